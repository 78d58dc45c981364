//! `fanin sim --report`: the runs, and the page that shows them, as one file that needs no network.
//!
//! The page is TypeScript (`page/src/report`), and `contract.ts` there says what it is given.

use std::path::Path;

use anyhow::{Context, anyhow, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

/// Empty where Node.js was missing when this fanin was built.
const PAGE: &str = include_str!(concat!(env!("OUT_DIR"), "/report.html"));
/// The place of the data in it, which is read back from there.
const BEFORE_DATA: &str = "<script type=\"application/json\" id=\"data\">";
const PLACE: &str = "__DATA__";

/// Bytes of recordings and links that one report has at most: more is too much for browsers. Later
/// runs have the other figures alone.
const OVER_TIME_MAX: usize = 64 << 20;
/// Series of the figures that the page does not draw.
const UNUSED: [(&str, &str); 3] =
    [("links", "loads"), ("servers", "received_gbps"), ("background", "delivered_gbps")];

/// A report that is being written. Its runs are texts, as there may be many.
#[derive(Debug, Serialize)]
pub struct Shown {
    command: String,
    runs: Vec<Box<RawValue>>,
    sweep: Option<Value>,
    reproduction: Option<Value>,
    #[serde(skip)]
    over_time: usize,
}

/// Whether reports can be written: better known before a run than after it.
///
/// # Errors
/// When this fanin was built without the page.
pub fn check_built() -> anyhow::Result<()> {
    ensure!(
        !PAGE.is_empty(),
        "this fanin was built without its pages, because Node.js was missing, so it writes no report: install Node.js 20 \
         or newer and run `make build` again; --json has the same figures"
    );
    Ok(())
}

impl Shown {
    /// Without runs yet. `command` writes it.
    #[must_use]
    pub const fn new(command: String) -> Self {
        Self { command, runs: Vec::new(), sweep: None, reproduction: None, over_time: 0 }
    }

    /// The same with the points of a sweep, or the findings and pictures of a paper.
    #[must_use]
    pub fn with(self, sweep: Option<Value>, reproduction: Option<Value>) -> Self {
        Self { sweep, reproduction, ..self }
    }

    /// Adds a run, made by [`run`] or [`other`].
    ///
    /// # Errors
    /// When it is none.
    pub fn add(&mut self, mut run: Value) -> anyhow::Result<()> {
        let links = run["result"]["links"].to_string().len();
        self.over_time += run["recording"].to_string().len() + links;
        if self.over_time > OVER_TIME_MAX {
            run["recording"] = Value::Null;
            run["result"]["links"] = Value::Array(Vec::new());
        }
        self.runs.push(RawValue::from_string(run.to_string())?);
        Ok(())
    }

    /// The whole file.
    ///
    /// # Errors
    /// When this fanin was built without the page.
    pub fn html(&self) -> anyhow::Result<String> {
        check_built()?;
        let (before, after) = PAGE.split_once(PLACE).context("the page has no place for data")?;
        // A name in a scenario ends no element of the page: `<` stands in strings alone.
        let data = serde_json::to_string(self)?.replace('<', "\\u003c");
        Ok([before, &data, after].concat())
    }
}

/// A run as the page takes it, of the document that `--json` writes.
///
/// # Errors
/// When it is no such document.
pub fn run(name: &str, mut document: Value) -> anyhow::Result<Value> {
    let scenario = document.get_mut("scenario").map(Value::take).context("it has no `scenario`")?;
    let toml = toml::to_string(&scenario).context("its scenario cannot be written as a file")?;
    let seed = document.get("seed").and_then(Value::as_u64).context("it has no `seed`")?;
    let result = document.get_mut("result").and_then(Value::as_object_mut).context("it has no `result`")?;
    let recording = result.remove("recording").unwrap_or(Value::Null);
    result.remove("link_ends_s");
    for (list, series) in UNUSED {
        for entry in result.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            entry.as_object_mut().map(|entry| entry.remove(series));
        }
    }
    let fields = document.as_object_mut().context("it is no object")?;
    fields.remove("scenario");
    fields.insert("name".into(), format!("{name}, seed {seed}").into());
    // JavaScript's numbers have 53 bits.
    fields.insert("seed".into(), seed.to_string().into());
    fields.insert("toml".into(), toml.into());
    fields.insert("recording".into(), recording);
    check(&document)?;
    Ok(document)
}

/// Whether this can be a run. The page looks at the rest.
fn check(run: &Value) -> anyhow::Result<()> {
    let lists = ["jobs", "links", "drops"].map(|list| (list, &run["result"][list]));
    for (field, of) in [("fanin", &run["fanin"]), ("result", &run["result"])] {
        ensure!(of.is_object(), "it has no `{field}`");
    }
    for (list, of) in lists {
        ensure!(of.is_array(), "its `result` has no `{list}`");
    }
    ensure!(run["toml"].is_string() && run["seed"].is_string(), "it has no scenario and seed");
    Ok(())
}

/// The run that is to be shown beside: the first of a report, or what `--json` wrote.
///
/// # Errors
/// When the file cannot be read, or has no run.
pub fn other(path: &Path) -> anyhow::Result<Value> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {shown}"))?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let found = match text.split_once(BEFORE_DATA).and_then(|(_, rest)| rest.split_once("</script>")) {
        Some((data, _)) => first_run(data),
        None => {
            serde_json::from_str(&text).map_err(anyhow::Error::from).and_then(|document| run(&name, document))
        }
    };
    found.map_err(|error| {
        anyhow!(
            "{shown} has no run to show beside this one: {error}; `fanin sim FILE --report OUT.html` writes one, and so does \
             `fanin sim FILE --record --json OUT.json`"
        )
    })
}

/// A report's own run, which is its first.
fn first_run(data: &str) -> anyhow::Result<Value> {
    #[derive(Deserialize)]
    struct Report {
        runs: Vec<Value>,
    }
    let Report { runs } = serde_json::from_str(data)?;
    let run = runs.into_iter().next().context("it is a report without runs")?;
    check(&run)?;
    Ok(run)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn document(scenario: Value) -> Value {
        json!({
            "fanin": { "version": "1", "commit": "c" },
            "scenario": scenario,
            "seed": 7,
            "result": { "jobs": [], "drops": [], "link_ends_s": [1.0], "links": [{ "from": "a", "loads": [1.0] }], "recording": { "ends": [1.0] } },
        })
    }

    #[test]
    fn a_run_has_its_scenario_as_a_file_and_its_recording_beside_the_figures() {
        let scenario = json!({ "title": "x", "network": { "hosts": 2 }, "job": [{ "tensor": "1kB" }] });
        let run = run("rack.toml", document(scenario.clone())).expect("a run");
        assert_eq!(run["name"], "rack.toml, seed 7");
        assert_eq!(run["recording"], json!({ "ends": [1.0] }));
        assert_eq!(run["seed"], "7");
        assert_eq!(run["result"], json!({ "jobs": [], "drops": [], "links": [{ "from": "a" }] }));
        let toml: Value = toml::from_str(run["toml"].as_str().expect("text")).expect("TOML");
        assert_eq!(toml, scenario);
    }

    #[test]
    fn what_is_no_result_is_refused_with_what_it_lacks() {
        for lacks in ["scenario", "seed", "result", "fanin"] {
            let mut document = document(json!({}));
            document.as_object_mut().expect("an object").remove(lacks);
            let refused = run("x", document).expect_err("refused").to_string();
            assert_eq!(refused, format!("it has no `{lacks}`"));
        }
    }

    #[test]
    fn figures_of_another_shape_are_refused() {
        let mut foreign = document(json!({}));
        foreign["result"] = json!({ "jobs": [] });
        let refused = run("x", foreign).expect_err("refused").to_string();
        assert_eq!(refused, "its `result` has no `links`");
        assert!(first_run("{\"runs\": [7]}").is_err());
        assert!(first_run("{\"runs\": []}").is_err());
    }

    #[test]
    fn runs_that_are_too_much_for_a_browser_have_figures_alone() {
        let mut shown = Shown::new(String::new());
        let mut large = document(json!({}));
        large["result"]["recording"] = Value::String("x".repeat(OVER_TIME_MAX * 2 / 5));
        for _ in 0..3 {
            shown.add(run("x", large.clone()).expect("a run")).expect("a run");
        }
        let runs: Vec<Value> =
            shown.runs.iter().map(|run| serde_json::from_str(run.get()).expect("JSON")).collect();
        let whole: Vec<bool> = runs.iter().map(|run| !run["recording"].is_null()).collect();
        assert_eq!(whole, [true, true, false]);
        assert_eq!(runs[2]["result"]["links"], json!([]));
    }

    #[test]
    fn a_name_with_markup_does_not_end_the_data_and_comes_back() {
        if check_built().is_err() {
            return; // Node.js is missing here; `make test` builds the page first.
        }
        let run = run("</script><b>.toml", document(json!({ "title": "</script>" }))).expect("a run");
        let mut shown = Shown::new("c".into());
        shown.add(run.clone()).expect("a run");
        let html = shown.html().expect("a report");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("out.html");
        std::fs::write(&path, html).expect("a file");
        assert_eq!(other(&path).expect("its run"), run);
    }
}
