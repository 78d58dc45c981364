//! What a rank says on stderr although nobody asked for its logs: once a process, as the training
//! goes on.

use std::io::Write;
use std::sync::Once;

use fanin_protocol::WorkerStatistics;

use super::split::Prediction;

/// As many packets say something about the path.
const PACKETS_MIN: u64 = 20_000;
/// One in so many that had to be sent again costs speed that can be seen.
const SENT_AGAIN_MAX: u64 = 50;

/// Says that the switch restarted.
pub(super) fn switch_restarted(rank: u16, switch: &str) {
    static ONCE: Once = Once::new();
    let text = || format!("switch {switch} restarted; the ranks join again and go on where they were");
    ONCE.call_once(|| say(rank, &text()));
}

/// Says that the switch next to the rank stays away.
pub(super) fn goes_around(rank: u16, switch: &str, by: &str) {
    static ONCE: Once = Once::new();
    let text = || format!("switch {switch} stays away; this rank goes on by {by}, without it");
    ONCE.call_once(|| say(rank, &text()));
}

/// Says that a rack adds nothing of a job with a loss bound.
pub(super) fn passes_by(rank: u16, rack: &str, root: &str) {
    static ONCE: Once = Once::new();
    let text = || {
        format!(
            "the rack {rack} adds nothing of a job with a loss bound: this rank sends to its root {root} itself"
        )
    };
    ONCE.call_once(|| say(rank, &text()));
}

/// Says that another service does what one did that is gone.
pub(super) fn taken_over(rank: u16, switch: &str, by: &str) {
    say(rank, &format!("switch {switch} is gone; {by} sums its share as well from now on"));
}

/// Says that many packets were sent again, once they are many.
pub(super) fn packets_lost(rank: u16, switch: &str, statistics: &WorkerStatistics) {
    static ONCE: Once = Once::new();
    if let Some(percent) = sent_again_percent(statistics.packets_sent, statistics.retransmissions) {
        let text = || {
            format!(
                "{percent} % of the packets to switch {switch} were sent again: they are lost on the way, a rank is often late, \
                 or a link carries less than its interface tells (FANIN_RATE; fanin doctor, fanin status)"
            )
        };
        ONCE.call_once(|| say(rank, &text()));
    }
}

/// Says that large all-reduces take so many seconds a byte at least, which does not fit the plan.
pub(super) fn plan_does_not_fit(rank: u16, planned: &Prediction, measured: f64, links: &str) {
    let text = misfit(planned, measured, links);
    tracing::warn!(rank, "{text}");
    say(rank, &text);
}

fn misfit(Prediction { seconds_per_byte, bound, .. }: &Prediction, measured: f64, links: &str) -> String {
    // If one service sums, no share follows from rates. A time is predicted then if all are told.
    let links = if links.is_empty() { "all links tell their rates" } else { links };
    format!(
        "the plan does not fit: a large all-reduce takes at least {:.3} ms/MB once it flows, and {:.3} ms/MB is planned, \
         bound by {bound} ({links}). This link or one like it carries less than planned, other traffic loads it, or the CPU \
         is the bottleneck. Call fanin.torch.replan on all ranks: it measures links of unknown rate anew, and can name \
         other switches. Or say what links carry (FANIN_RATE=1gbit to ranks, --rate 1gbit to `fanin switch`) and start \
         again; `fanin doctor --measure` on one machine first has links of unknown rate measured then",
        1e9 * measured,
        1e9 * seconds_per_byte,
    )
}

fn sent_again_percent(sent: u64, again: u64) -> Option<u64> {
    (sent >= PACKETS_MIN && again > sent / SENT_AGAIN_MAX).then(|| (100 * again).div_ceil(sent))
}

/// Tells whoever watches the process.
pub(super) fn say(rank: impl std::fmt::Display, text: &str) {
    // Nobody is there to hear when this fails.
    let _ = writeln!(std::io::stderr(), "fanin: rank {rank}: {text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_misfit_names_times_and_what_binds_and_whence_rates_are() {
        let planned = Prediction {
            seconds_per_byte: 8e-9,
            bound: "the link out of 10.0.0.9:4800".into(),
            ring_seconds_per_byte: None,
        };
        let text = misfit(&planned, 32.04e-9, "all links were measured, 1 Gbit/s");
        assert!(text.starts_with(
            "the plan does not fit: a large all-reduce takes at least 32.040 ms/MB once it flows, and 8.000 ms/MB is \
             planned, bound by the link out of 10.0.0.9:4800 (all links were measured, 1 Gbit/s). "
        ));
        assert!(
            ["FANIN_RATE", "--rate", "fanin.torch.replan", "fanin doctor --measure"]
                .iter()
                .all(|cure| text.contains(cure))
        );
        assert!(misfit(&planned, 32e-9, "").contains("(all links tell their rates)"));
    }

    #[test]
    fn losses_are_told_when_many_of_many_packets_were_sent_again() {
        assert_eq!(sent_again_percent(PACKETS_MIN - 1, PACKETS_MIN - 1), None);
        assert_eq!(sent_again_percent(100_000, 2_000), None);
        assert_eq!(sent_again_percent(100_000, 2_001), Some(3));
        assert_eq!(sent_again_percent(100_000, 50_000), Some(50));
    }
}
