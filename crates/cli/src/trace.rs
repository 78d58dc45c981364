//! `fanin trace`: the step that a recorded training repeats.

use std::path::PathBuf;

use anyhow::{Context, ensure};

use crate::output;
use crate::step::{Step, has_layers};

/// Say which step a recorded training repeats, and write it as layers
///
/// Reads the timelines of one rank, or of all ranks of a run. FANIN_TRACE=trace.json writes them.
/// For a training on Gloo, torch.profiler.profile(record_shapes=True) exports them. The step has
/// each sum, and when it is asked for. Layers are for scenarios of fanin sim, and for
/// fanin plan --trace.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    FANIN_TRACE=trace.json torchrun --nnodes 4 .. train.py\n  \
    fanin trace trace.*.json\n  \
    fanin trace trace.*.json --out step.toml\n\n\
    A scenario of fanin sim then has:\n  \
    [[job]]\n  \
    system = \"switchml\"\n  \
    workers = 4\n  \
    layers = \"step.toml\"\n  \
    compute = 10          # processors ten times as fast")]
pub(crate) struct Arguments {
    /// Timelines of one run
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write the step as layers (TOML)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(
        !arguments.files.iter().any(|path| has_layers(path)),
        "layers (.toml) are a step already: fanin trace reads timelines"
    );
    let step = Step::read(&arguments.files)?;
    if let Some(path) = &arguments.out {
        std::fs::write(path, step.layers()?).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let text = if arguments.json {
        serde_json::to_string(&step)?
    } else {
        format!("{}\n{}", step.shown(1.0), step.table())
    };
    Ok(output::line(&text)?)
}
