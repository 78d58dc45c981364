//! `fanin top`: what `fanin page` shows, in a terminal.

mod screen;

use std::io::IsTerminal;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use fanin_controller::page::Watch;
use fanin_controller::page::view::State;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use self::screen::{Chosen, draw};
use crate::page::meant;
use crate::tls::Known;

/// How often keys are looked for.
const TICK: Duration = Duration::from_millis(100);
/// How often the state is.
const TICKS: u32 = 5;
/// Seconds of history that are drawn.
const DRAWN: f64 = 600.0;

/// Show services, their jobs, and who is late, in the terminal
///
/// It shows what `fanin page` shows, and asks as that does. Keys: left and right for another job,
/// up and down for other ranks, q to end.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    fanin top                        this machine's services\n  \
    fanin top 10.0.0.9:4800          a switch, and the services of its jobs\n  \
    ssh -t 10.0.0.9 fanin top")]
pub(crate) struct Arguments {
    /// Switches, or services of ranks [default: FANIN_SWITCH, or the services on this machine, or
    /// 127.0.0.1:4800]
    #[arg(value_name = "HOST:PORT")]
    services: Vec<String>,
    #[command(flatten)]
    known: Known,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    ensure!(
        std::io::stdout().is_terminal(),
        "fanin top draws on a terminal, and the output is none; fanin status writes text and JSON"
    );
    let services = meant(&arguments.services);
    let (watch, asking) = Watch::of_services(services.join(", "), services, true, arguments.known.trust()?);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .enable_all()
        .build()
        .context("cannot start a thread")?;
    runtime.spawn(asking);
    let mut terminal = ratatui::try_init().context("cannot draw on this terminal")?;
    let shown = show(&mut terminal, || watch.state(now() - DRAWN));
    ratatui::restore();
    runtime.shutdown_background();
    shown.context("cannot draw on this terminal")
}

fn show(terminal: &mut ratatui::DefaultTerminal, state: impl Fn() -> State) -> std::io::Result<()> {
    let mut chosen = Chosen::default();
    loop {
        let now = state();
        for _ in 0..TICKS {
            terminal.draw(|frame| draw(frame, &now, &mut chosen))?;
            if event::poll(TICK)?
                && let Event::Key(key) = event::read()?
                && key.kind == KeyEventKind::Press
                && !heeds(key, &mut chosen)
            {
                return Ok(());
            }
        }
    }
}

/// Whether it goes on.
fn heeds(KeyEvent { code, modifiers, .. }: KeyEvent, chosen: &mut Chosen) -> bool {
    match code {
        KeyCode::Char('q') | KeyCode::Esc => return false,
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => return false,
        KeyCode::Right | KeyCode::Tab | KeyCode::Char('l') => chosen.next_job(1),
        KeyCode::Left | KeyCode::BackTab | KeyCode::Char('h') => chosen.next_job(-1),
        KeyCode::Down | KeyCode::Char('j') => chosen.scroll(1),
        KeyCode::Up | KeyCode::Char('k') => chosen.scroll(-1),
        KeyCode::PageDown => chosen.scroll(20),
        KeyCode::PageUp => chosen.scroll(-20),
        _ => {}
    }
    true
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}
