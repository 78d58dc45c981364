//! How a job with a loss bound is cut into flows (DLCP), and what they cost a switch's memory.

use core::time::Duration;

use fanin_wire::{Generation, JobId, Key, LossBound, PATHS_MAX, ShardId, block_packet_bytes};

use super::{Finish, JobConfig, RateConfig};
use crate::control::UNIT_ELEMENTS;
use crate::transport::RetransmissionConfig;

/// Blocks of a flow, at least. The bound holds for each flow and is rounded down to blocks. Of 512 blocks, 0.2 % are one block.
const FLOW_BLOCKS: u32 = 512;
/// Bytes of a flow, at most, where memory allows. Each flow has signals both ways, whatever its length: flows of 720 kB had one of them for two trains.
const FLOW_BYTES: u32 = 4 << 20;
/// Bytes of contributions and sums of all blocks that a worker has under way, about; a switch has room for twice as many. With 8 workers they are
/// 3.6 MB of a worker's tensors.
const BYTES_UNDER_WAY: u32 = 32 << 20;
/// Flows that a worker has under way at most: short tensors are a flow each.
const FLOWS_UNDER_WAY: u16 = 16;
/// Words of the contributions and the sum of one block, at most.
const WORDS_OF_BLOCK: u32 = 32_768;
/// How long nothing more must have come after a stop: about as long as two processes that share a core wait for it.
const QUIET: Duration = Duration::from_millis(1);
/// How much leaves at once: at 1 Gbit/s as much as two trains carry. Shorter ones cost a sleep and a system call each: with 500 us at 10 Gbit/s ranks that
/// share cores took a twentieth more CPU time.
const AHEAD: Duration = Duration::from_millis(1);
/// And so many packets at least.
const PACKETS_AHEAD: u32 = 8;
/// Packets that a receiver reports on at least: reports every 200 us (footnote 3) would be a fifth of what a link of 20 Mbit/s carries.
const PACKETS_REPORTED: u32 = 32;
/// And twice as long as what leaves at once takes at the link's rate. In a period that is shorter some of it has come and some has not, and that looks like
/// congestion: flows between processes that share cores were halved for it, and waited.
const AHEADS_REPORTED: u32 = 2;
/// And so many times more seldom while less is lost than comes. At 1 Gbit/s a report every 2 ms is one for two trains, and wakes whom it is for.
const CALM_PERIODS: u32 = 8;
/// However slow a link is.
const PERIOD_MAX: Duration = Duration::from_millis(250);
/// A packet's headers below UDP's payload, on an Ethernet: preamble, frame, IP and UDP.
const FRAMING_BYTES: u32 = 66;

/// The flows of a job that has a loss bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowPlan {
    /// What each worker's part of a flow may lose on its way to the switch.
    pub loss_bound: LossBound,
    /// Blocks of a flow.
    pub flow_blocks: u32,
    /// Flows that a worker has under way.
    pub flows: u16,
    /// And their blocks.
    pub window_blocks: u32,
    /// What a shard has of the slowest rank's link.
    pub line_rate_bps: u64,
    /// Source ports that a rank's packets are spread over.
    pub paths: u8,
}

impl FlowPlan {
    /// The flows of a job of so many workers, whose blocks have so many words of four bytes.
    #[must_use]
    pub fn new(loss_bound: LossBound, workers: u16, elements: u16, line_rate_bps: u64) -> Self {
        let of_block = 4 * words_of_block(workers, elements).max(1);
        let window_blocks = (BYTES_UNDER_WAY / of_block).max(2 * FLOW_BLOCKS);
        let most = (FLOW_BYTES / (4 * u32::from(elements).max(1))).max(FLOW_BLOCKS);
        let flow_blocks = (window_blocks / 2).min(most);
        Self { loss_bound, flow_blocks, flows: FLOWS_UNDER_WAY, window_blocks, line_rate_bps, paths: 1 }
    }

    /// The same over so many paths, 1 to [`PATHS_MAX`].
    #[must_use]
    pub fn over(self, paths: u32) -> Self {
        Self { paths: paths.clamp(1, PATHS_MAX.into()) as u8, ..self }
    }

    /// Whether blocks of so many words are short enough for so many workers: two flows of them are half of a usual pool.
    pub fn fits(workers: u16, elements: u16) -> bool {
        words_of_block(workers, elements) <= WORDS_OF_BLOCK
    }

    /// What they take of a shard's pool at most, in units of 256 elements: of each block of all flows that there may be at the switch, a sum and
    /// each worker's contribution.
    #[must_use]
    pub fn pool_units(&self, workers: u16, elements: u16) -> u32 {
        // Workers may be as far apart as they have blocks under way.
        let words = 2 * u64::from(self.window_blocks) * u64::from(words_of_block(workers, elements));
        u32::try_from(words.div_ceil(2 * u64::from(UNIT_ELEMENTS))).unwrap_or(u32::MAX)
    }

    /// The job as its machines are told of it, in the first shard. What nobody chooses is chosen here.
    #[must_use]
    pub fn job_config(
        &self,
        (id, key, generation): (JobId, Key, Generation),
        workers: u16,
        elements: u16,
    ) -> JobConfig {
        let own_bytes = block_packet_bytes(4 * usize::from(elements)) + key.security().extra_bytes();
        let packet_bytes = own_bytes as u32 + FRAMING_BYTES;
        JobConfig {
            id,
            key,
            generation,
            workers,
            shard: ShardId(0),
            elements,
            push_bound: self.loss_bound,
            // All ranks get the same bits.
            pull_bound: LossBound::RELIABLE,
            flow_blocks: self.flow_blocks,
            flows: self.flows,
            window_blocks: self.window_blocks,
            rate: self.rate(packet_bytes),
            finish: Finish::Stopped,
            quiet: self.quiet(packet_bytes),
            retransmission: RetransmissionConfig::default(),
            paths: self.paths,
            resumes_at: None,
        }
    }
}

impl FlowPlan {
    /// How fast a flow of packets of that length is sent.
    fn rate(&self, packet_bytes: u32) -> RateConfig {
        let of_link = RateConfig::of_link(self.line_rate_bps, packet_bytes);
        let packet = self.packet(packet_bytes);
        let ahead = AHEAD.max(PACKETS_AHEAD * packet).min(PERIOD_MAX);
        let period = (AHEADS_REPORTED * ahead).max(PACKETS_REPORTED * packet).min(PERIOD_MAX);
        RateConfig { period, ahead, calm_periods: CALM_PERIODS, follows: true, ..of_link }
    }

    /// How long nothing more must have come: what waits on the last of several paths comes no faster than that one's part of the rate.
    fn quiet(&self, packet_bytes: u32) -> Duration {
        match self.paths {
            1 => QUIET,
            paths => (QUIET + u32::from(paths) * self.packet(packet_bytes)).min(PERIOD_MAX),
        }
    }

    /// How long a packet of that length takes.
    fn packet(&self, packet_bytes: u32) -> Duration {
        let ns = 8_000_000_000 * u64::from(packet_bytes) / self.line_rate_bps.max(1);
        Duration::from_nanos(ns).min(PERIOD_MAX)
    }
}

fn words_of_block(workers: u16, elements: u16) -> u32 {
    (1 + u32::from(workers)) * u32::from(elements)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plan(workers: u16, elements: u16) -> FlowPlan {
        let bound = LossBound::new(0.01).expect("a fraction");
        FlowPlan::new(bound, workers, elements, 1_000_000_000)
    }

    #[test]
    fn flows_are_as_long_as_memory_and_their_length_in_bytes_allow_and_two_are_under_way() {
        let of = |workers, elements| {
            let plan = plan(workers, elements);
            (plan.flow_blocks, plan.window_blocks)
        };
        // Blocks of 1,408 bytes: 4 MiB are 2,978 of them, and those of 8 workers have 32 MiB.
        assert_eq!([of(2, 352), of(8, 352), of(64, 352)], [(2_978, 7_943), (1_323, 2_647), (512, 1_024)]);
        assert_eq!([of(4, 2048), of(64, 2048)], [(512, 1_024), (512, 1_024)]);
    }

    #[test]
    fn what_gathers_at_a_switch_is_counted_against_its_pool() {
        // Twice 2,647 blocks, each 9 times 352 words, in units of 512 words.
        assert_eq!(plan(8, 352).pool_units(8, 352), 32_757);
        assert_eq!(plan(64, 352).pool_units(64, 352), 91_520);
    }

    #[test]
    fn a_bound_of_a_fifth_of_a_percent_forgives_a_block_of_a_flow() {
        let bound = LossBound::new(0.002).expect("a fraction");
        assert_eq!(bound.of_blocks(FLOW_BLOCKS), 1);
    }

    #[test]
    fn reports_are_as_seldom_and_trains_as_long_as_a_slow_link_asks_for() {
        let of = |line_rate_bps| {
            let rate = FlowPlan { line_rate_bps, ..plan(8, 352) }.rate(1250);
            (rate.period.as_micros(), rate.ahead.as_micros())
        };
        // A packet of 10,000 bits takes 500, 10 and 1 us.
        assert_eq!(of(20_000_000), (16_000, 4_000));
        assert_eq!(of(1_000_000_000), (2000, 1000));
        assert_eq!(of(10_000_000_000), (2000, 1000));
        assert_eq!(of(1), (250_000, 250_000), "not longer than anybody waits");
    }

    #[test]
    fn what_waits_on_a_slow_path_is_waited_for() {
        let of = |line_rate_bps, paths| {
            FlowPlan { line_rate_bps, ..plan(8, 352) }.over(paths).quiet(1250).as_micros()
        };
        // A packet of 10,000 bits takes 500 and 1 us; 0 is what who knows of no paths says.
        assert_eq!([of(20_000_000, 0), of(20_000_000, 1), of(20_000_000, 8)], [1_000, 1_000, 5_000]);
        assert_eq!([of(10_000_000_000, 8), of(1, 2)], [1_008, 250_000]);
    }

    #[test]
    fn machines_take_what_is_planned() {
        let who = (JobId(1), Key::new(1), Generation(0));
        for (workers, elements, paths) in [(1, 32, 0), (8, 352, 8), (64, 2048, u32::MAX)] {
            let config = plan(workers, elements).over(paths).job_config(who, workers, elements);
            assert!(config.check().is_ok());
        }
    }
}
