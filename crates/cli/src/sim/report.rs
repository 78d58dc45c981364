//! `fanin sim --report`: the runs, and the page that shows them, as one file that needs no network.
//!
//! The page is TypeScript (`page/src/report`), and `contract.ts` there says what it is given.

use std::path::Path;

use anyhow::{Context, anyhow, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Empty where Node.js was missing when this fanin was built.
const PAGE: &str = include_str!(concat!(env!("OUT_DIR"), "/report.html"));
/// The place of the data in it, which is read back from there.
const BEFORE_DATA: &str = "<script type=\"application/json\" id=\"data\">";
const PLACE: &str = "__DATA__";

/// Bytes of recordings that one report has at most; later runs have figures alone.
const RECORDINGS_MAX: usize = 64 << 20;

/// What a report shows.
#[derive(Debug, Deserialize, Serialize)]
pub struct Shown {
    /// The command that wrote it.
    pub command: String,
    /// A run, and the one beside it; or those of a sweep or a reproduction.
    pub runs: Vec<Value>,
    /// Of a sweep: its points.
    pub sweep: Option<Value>,
    /// Of a reproduction: its findings and pictures.
    pub reproduction: Option<Value>,
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
    /// The whole file.
    ///
    /// # Errors
    /// When this fanin was built without the page.
    pub fn html(&mut self) -> anyhow::Result<String> {
        check_built()?;
        let (before, after) = PAGE.split_once(PLACE).context("the page has no place for data")?;
        limit(&mut self.runs, RECORDINGS_MAX);
        // A name in a scenario ends no element of the page: `<` stands in strings alone.
        let data = serde_json::to_string(self)?.replace('<', "\\u003c");
        Ok([before, &data, after].concat())
    }
}

/// Leaves recordings out from the run on that is too much for a browser.
fn limit(runs: &mut [Value], bytes_max: usize) {
    let mut bytes = 0;
    for run in runs {
        bytes += run["recording"].to_string().len();
        if bytes > bytes_max {
            run["recording"] = Value::Null;
        }
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
    // The recording has them in less room.
    result.remove("link_ends_s");
    for link in result.get_mut("links").and_then(Value::as_array_mut).into_iter().flatten() {
        link.as_object_mut().map(|link| link.remove("loads"));
    }
    let run = document.as_object_mut().context("it is no object")?;
    run.remove("scenario");
    run.insert("name".into(), format!("{name}, seed {seed}").into());
    run.insert("toml".into(), toml.into());
    run.insert("recording".into(), recording);
    Ok(document)
}

/// The run that is to be shown beside: of a report, or of what `--json` wrote.
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

fn first_run(data: &str) -> anyhow::Result<Value> {
    let shown: Shown = serde_json::from_str(data)?;
    shown.runs.into_iter().next().context("it is a report without runs")
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
            "result": { "jobs": [], "link_ends_s": [1.0], "links": [{ "from": "a", "loads": [1.0] }], "recording": { "ends": [1.0] } },
        })
    }

    #[test]
    fn a_run_has_its_scenario_as_a_file_and_its_recording_beside_the_figures() {
        let scenario = json!({ "title": "x", "network": { "hosts": 2 }, "job": [{ "tensor": "1kB" }] });
        let run = run("rack.toml", document(scenario.clone())).expect("a run");
        assert_eq!(run["name"], "rack.toml, seed 7");
        assert_eq!(run["recording"], json!({ "ends": [1.0] }));
        assert_eq!(run["result"], json!({ "jobs": [], "links": [{ "from": "a" }] }));
        let toml: Value = toml::from_str(run["toml"].as_str().expect("text")).expect("TOML");
        assert_eq!(toml, scenario);
    }

    #[test]
    fn what_is_no_result_is_refused_with_what_it_lacks() {
        for lacks in ["scenario", "seed", "result"] {
            let mut document = document(json!({}));
            document.as_object_mut().expect("an object").remove(lacks);
            let refused = run("x", document).expect_err("refused").to_string();
            assert_eq!(refused, format!("it has no `{lacks}`"));
        }
    }

    #[test]
    fn recordings_beyond_the_limit_are_left_out() {
        let mut runs = vec![json!({ "recording": "x".repeat(98) }); 3];
        limit(&mut runs, 250);
        let kept: Vec<bool> = runs.iter().map(|run| !run["recording"].is_null()).collect();
        assert_eq!(kept, [true, true, false]);
    }

    #[test]
    fn a_name_with_markup_does_not_end_the_data_and_comes_back() {
        if check_built().is_err() {
            return; // Node.js is missing here; `make test` builds the page first.
        }
        let run = run("</script><b>.toml", document(json!({ "title": "</script>" }))).expect("a run");
        let runs = vec![run.clone()];
        let html =
            Shown { command: "c".into(), runs, sweep: None, reproduction: None }.html().expect("a report");
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("out.html");
        std::fs::write(&path, html).expect("a file");
        assert_eq!(other(&path).expect("its run"), run);
    }
}
