//! Settings of the whole network.

/// How packets choose among equally short paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Multipath {
    /// All packets of a flow (addresses and ports) the same one, by a hash that the seed
    /// salts.
    #[default]
    PerFlow,
    /// Each packet its own, by the dice.
    PerPacket,
}

/// Settings of the whole network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct NetworkConfig {
    /// All randomness comes from it.
    pub seed: u64,
    /// Choice of paths.
    pub multipath: Multipath,
}
