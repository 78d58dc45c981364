//! Files beside a scenario, which several scenarios may share: one of nodes and links (`[network]
//! file`), and one of each job's layers (`layers`).

use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use toml::Spanned;
use toml::de::{DeTable, Deserializer};

use super::error::{FileError, Mistake};
use super::schema::{File, LayersFile, LayersTable, TopologyFile};

/// A scenario's text, and that of the file beside it, if it names one.
pub(super) struct Texts<'t> {
    name: &'t str,
    scenario: &'t str,
    /// The file beside the scenario, and its text.
    beside: Option<(PathBuf, String)>,
}

impl<'t> Texts<'t> {
    pub(super) const fn new(name: &'t str, scenario: &'t str) -> Self {
        Self { name, scenario, beside: None }
    }

    /// Puts the tables of the file beside the scenario before those of the scenario, which can
    /// change them so. It is looked for from the scenario's folder.
    pub(super) fn read_beside(&mut self, file: &mut File) -> Result<(), Mistake> {
        for job in &mut file.job {
            if let Some(given) = &mut job.get_mut().layers
                && let LayersTable::File(path) = given.get_ref()
            {
                let read: LayersFile = self.layers(given.span(), path)?;
                *given.get_mut() = LayersTable::Given(read.layer);
            }
        }
        let Some(given) = &file.network.file else { return Ok(()) };
        let scenario_bytes = self.scenario.len();
        let tables = tables(self.beside(given)?, scenario_bytes)?;
        file.node.splice(0..0, tables.node);
        file.link.splice(0..0, tables.link);
        Ok(())
    }

    /// The scenario with these tables in it, and without the file.
    pub(super) fn merged(&mut self) -> Result<toml::Table, Mistake> {
        let of_toml = |error| Mistake::of_toml(&error);
        let given: Named = toml::from_str(self.scenario).map_err(of_toml)?;
        let mut scenario: toml::Table = toml::from_str(self.scenario).map_err(of_toml)?;
        for (number, job) in given.job.into_iter().enumerate() {
            let Some(layers) = job.layers else { continue };
            if let toml::Value::String(path) = layers.get_ref() {
                let mut read: toml::Table = self.layers(layers.span(), path)?;
                scenario["job"][number]["layers"] =
                    read.remove("layer").unwrap_or(toml::Value::Array(Vec::new()));
            }
        }
        let Some(given) = given.network.and_then(|network| network.file) else { return Ok(scenario) };
        let text = self.beside(&given)?.to_owned();
        tables(&text, self.scenario.len())?;
        if let Some(toml::Value::Table(network)) = scenario.get_mut("network") {
            network.remove("file");
        }
        for (key, value) in toml::from_str::<toml::Table>(&text).map_err(of_toml)? {
            let own = scenario.remove(&key);
            let both = [Some(value), own].into_iter().flatten();
            let entries = both.filter_map(|value| value.as_array().cloned()).flatten().collect();
            scenario.insert(key, toml::Value::Array(entries));
        }
        Ok(scenario)
    }

    /// A file of layers, which a job names at this place.
    fn layers<T: DeserializeOwned>(&self, span: Range<usize>, path: &str) -> Result<T, Mistake> {
        let text = self.read(&span, path)?.1;
        toml::from_str(&text).map_err(|error| {
            let Mistake { span: within, message } = Mistake::of_toml(&error);
            Mistake { span: Some(span), message: FileError::new(path, &text, within, message).to_string() }
        })
    }

    fn read(&self, span: &Range<usize>, given: &str) -> Result<(PathBuf, String), Mistake> {
        let path = Path::new(self.name).with_file_name(given);
        let text = std::fs::read_to_string(&path).map_err(|error| {
            let path = path.display();
            let message = format!("cannot read {path}: {error}; it is looked for from the scenario's folder");
            Mistake { span: Some(span.clone()), message }
        })?;
        Ok((path, text))
    }

    fn beside(&mut self, given: &Spanned<String>) -> Result<&str, Mistake> {
        let read = self.read(&given.span(), given.get_ref())?;
        Ok(&self.beside.insert(read).1)
    }

    /// A mistake with the file, line and column that it is in.
    pub(super) fn locate(&self, Mistake { span, message }: Mistake) -> FileError {
        let begin = self.scenario.len() + 1;
        match (&self.beside, span) {
            (Some((path, text)), Some(span)) if span.start >= begin => {
                let span = span.start - begin..span.end - begin;
                FileError::new(&path.display().to_string(), text, Some(span), message)
            }
            (_, span) => FileError::new(self.name, self.scenario, span, message),
        }
    }
}

/// The files that a scenario names, whatever else is in it.
#[derive(Deserialize)]
struct Named {
    network: Option<NamedInNetwork>,
    #[serde(default)]
    job: Vec<NamedInJob>,
}

#[derive(Deserialize)]
struct NamedInJob {
    layers: Option<Spanned<toml::Value>>,
}

#[derive(Deserialize)]
struct NamedInNetwork {
    file: Option<Spanned<String>>,
}

/// The tables of a text, whose places are counted on from the end of the scenario: so a place says
/// which of the two it is in. It is one more than the scenario is long, since what is missing at a
/// file's end is said to be behind it.
fn tables(text: &str, scenario_bytes: usize) -> Result<TopologyFile, Mistake> {
    let behind = " ".repeat(scenario_bytes + 1) + text;
    let document = DeTable::parse(&behind).map_err(|error| Mistake::of_toml(&error))?;
    TopologyFile::deserialize(Deserializer::from(document)).map_err(|error| Mistake::of_toml(&error))
}
