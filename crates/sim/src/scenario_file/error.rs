//! Mistakes in a scenario, each with its place.

use std::ops::Range;

use toml::Spanned;

/// Something in a file that cannot be, and where it stands.
#[derive(Debug)]
pub struct Mistake {
    pub(super) span: Option<Range<usize>>,
    pub(super) message: String,
}

/// The mistake at a place of the file; a default stands nowhere.
pub fn at<T>(place: &Spanned<T>, message: impl std::fmt::Display) -> Mistake {
    let span = Some(place.span()).filter(|span| !span.is_empty());
    Mistake { span, message: message.to_string() }
}

/// A mistake in a scenario file. Its text begins with file, line and column, and ends with the line
/// itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    file: String,
    /// Counted from 1; 0 where the mistake is in no one place.
    line: usize,
    column: usize,
    message: String,
    source: String,
}

impl FileError {
    pub(super) fn new(file: &str, text: &str, span: Option<Range<usize>>, message: String) -> Self {
        let Some(at) =
            span.map(|span| span.start).filter(|at| *at <= text.len() && text.is_char_boundary(*at))
        else {
            return Self { file: file.to_owned(), line: 0, column: 0, message, source: String::new() };
        };
        let begin = text[..at].rfind('\n').map_or(0, |newline| newline + 1);
        Self {
            file: file.to_owned(),
            line: text[..at].matches('\n').count() + 1,
            column: text[begin..at].chars().count() + 1,
            message,
            source: text[begin..].lines().next().unwrap_or_default().to_owned(),
        }
    }

    /// The line that it is in, from 1; 0 where it is in no one line.
    #[must_use]
    pub const fn line(&self) -> usize {
        self.line
    }
}

impl Mistake {
    /// A mistake that the TOML reader found, with the nearest name that it would have taken.
    pub(super) fn of_toml(error: &toml::de::Error) -> Self {
        let message = error.message().trim_end();
        // serde says: unknown field `x`, expected one of `a`, `b`
        let mut quoted = message.split('`').skip(1).step_by(2);
        let message = match (message.strip_prefix("unknown "), quoted.next()) {
            (Some(rest), Some(given)) => {
                let what = if rest.starts_with("field") { "key" } else { "name" };
                unknown(what, given, quoted)
            }
            // A person does not count in Rust's types.
            _ => ["usize", "u64", "u32", "u16", "u8"].iter().fold(message.to_owned(), |message, integer| {
                message.replace(&format!("expected {integer}"), "expected a whole number, not negative")
            }),
        };
        Self { span: error.span(), message }
    }
}

/// Names in a message: more than a person reads.
const NAMES_SHOWN: usize = 40;

/// The message for a name that is none, with the nearest of those that are.
pub fn unknown<'a>(what: &str, given: &str, known: impl Iterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.collect();
    if known.is_empty() {
        return format!("unknown {what} `{given}`: there is none");
    }
    let similarity = |name: &str| strsim::jaro_winkler(&given.to_lowercase(), &name.to_lowercase());
    let nearest = known.iter().max_by(|a, b| similarity(a).total_cmp(&similarity(b)));
    match nearest.filter(|name| similarity(name) > 0.7) {
        Some(nearest) => format!("unknown {what} `{given}`; did you mean `{nearest}`?"),
        None => {
            let more = if known.len() > NAMES_SHOWN { ", .." } else { "" };
            let shown = known[..known.len().min(NAMES_SHOWN)].join(", ");
            format!("unknown {what} `{given}`; known: {shown}{more}")
        }
    }
}

impl std::fmt::Display for FileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.line == 0 {
            return write!(f, "{}: {}", self.file, self.message);
        }
        let Self { file, line, column, message, source } = self;
        let margin = line.to_string();
        let (blank, before) = (" ".repeat(margin.len()), " ".repeat(column - 1));
        write!(f, "{file}:{line}:{column}: {message}\n {margin} | {source}\n {blank} | {before}^")
    }
}

impl std::error::Error for FileError {}
