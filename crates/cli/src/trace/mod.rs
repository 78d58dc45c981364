//! `fanin trace`: the step that a recorded training repeats, and the timelines of all ranks as one.

mod joined;
mod services;

use std::path::PathBuf;

use anyhow::{Context, ensure};

use joined::Joined;

use crate::output;
use crate::step::recorded::chakra::is_chakra;
use crate::step::{Step, has_layers};

/// Say which step a recorded training repeats, and write it as layers; or join the ranks' timelines
///
/// Reads the timelines of one rank, or of all ranks of a run. FANIN_TRACE=trace.json writes them.
/// For a training on Gloo or NCCL, torch.profiler.profile(record_shapes=True) exports them, on a GPU
/// with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]. Execution traces of MLCommons
/// Chakra have the ending .et. The step has each sum, and when it is asked for. Layers are for
/// scenarios of fanin sim, and for fanin plan --trace. With --join, timelines of FANIN_TRACE become
/// one file on one clock; the ranks that others wait for are named, and what services summed.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    FANIN_TRACE=trace.json torchrun --nnodes 4 .. train.py\n  \
    fanin trace trace.*.json\n  \
    fanin trace trace.*.json --out step.toml\n  \
    fanin trace chakra.*.et\n  \
    fanin trace trace.*.json --join all.json   (for ui.perfetto.dev)\n\n\
    A scenario of fanin sim then has:\n  \
    [[job]]\n  \
    system = \"switchml\"\n  \
    workers = 4\n  \
    layers = \"step.toml\"\n  \
    compute = 10          # processors ten times as fast")]
pub(crate) struct Arguments {
    /// Timelines of one run, its profiles by PyTorch, or its execution traces (.et)
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Write the step as layers (TOML)
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Write the timelines of all ranks as one, on the first rank's clock
    #[arg(long, value_name = "FILE", conflicts_with = "out")]
    join: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(
        !arguments.files.iter().any(|path| has_layers(path)),
        "layers (.toml) are a step already: fanin trace reads timelines"
    );
    if let Some(path) = &arguments.join {
        ensure!(
            !arguments.files.iter().any(|path| is_chakra(path)),
            "execution traces of Chakra (.et) have no common clock: --join takes what FANIN_TRACE=trace.json writes"
        );
        ensure!(!arguments.files.contains(path), "{} is one of the timelines", path.display());
        let joined = Joined::read(&arguments.files)?;
        joined.write(path)?;
        let text = if arguments.json { serde_json::to_string(&joined)? } else { joined.table() };
        return Ok(output::line(&text)?);
    }
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
