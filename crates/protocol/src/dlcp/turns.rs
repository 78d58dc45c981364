//! The turns of the paths of a worker's packets (DLCP §3.2.3).

/// Each path has its turn once a round, and a round begins with any of them. In one order for ever,
/// some packets follow each other again and again, such as the stops of two flows that are not
/// answered. Then one packet could always be on the same path, which may be dead.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    paths: u8,
    path: u8,
    /// How many of the round have had their turn.
    done: u8,
    random: u32,
}

impl Turns {
    pub(super) const fn new(paths: u8) -> Self {
        Self { paths, path: 0, done: 0, random: 0x9e37_79b9 }
    }

    /// The path whose turn it is.
    pub(super) const fn path(&self) -> u8 {
        self.path
    }

    /// It is the next one's.
    pub(super) const fn pass(&mut self) {
        if self.paths == 1 {
            return;
        }
        (self.path, self.done) = ((self.path + 1) % self.paths, self.done + 1);
        if self.done == self.paths {
            // Marsaglia's xorshift, which comes to every number but 0.
            self.random ^= self.random << 13;
            self.random ^= self.random >> 17;
            self.random ^= self.random << 5;
            (self.path, self.done) = ((self.random % self.paths as u32) as u8, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec::Vec;
    use fanin_wire::PATHS_MAX;

    #[test]
    fn all_paths_have_as_many_turns_and_no_packet_of_a_pattern_has_always_the_same() {
        for paths in 1..=PATHS_MAX {
            let mut turns = Turns::new(paths);
            let order: Vec<u8> = (0..64 * usize::from(paths))
                .map(|_| {
                    let path = turns.path();
                    turns.pass();
                    path
                })
                .collect();
            for path in 0..paths {
                assert_eq!(order.iter().filter(|other| **other == path).count(), 64);
                for pattern in 1..=16 {
                    let all = order.chunks_exact(pattern).all(|packets| packets[0] == path);
                    assert!(!all || paths == 1, "{paths} paths, {pattern} packets");
                }
            }
        }
    }
}
