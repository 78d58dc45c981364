//! Rates, sizes, times and shares as people write them: `"100Gbit"`, `"4MB"`, `"10us"`, `"0.1%"`.
//!
//! Scenario files, flags of `fanin` and a rank's settings have this one grammar: a number, and a
//! unit right behind it, in any case. Rates are in bits, as `tc` writes them. Another spelling is
//! refused. If its number can be read, the error says what to write.
//!
//! Deliberately absent: how quantities are shown, and quantities without a unit.

#![forbid(unsafe_code)]

use std::str::FromStr;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error, Visitor};

/// Bits a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate(pub u64);

/// Bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size(pub u64);

/// A time, or a moment after the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Time(pub Duration);

/// A time that a core takes, in picoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct CoreTime(pub u64);

/// A number from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share(pub f64);

/// The highest rate: at 8 Tbit/s, a byte takes a picosecond.
pub const RATE_MAX_BPS: u64 = 8_000_000_000_000;
const SIZE_MAX_BYTES: f64 = 1e15;
/// A year.
const TIME_MAX_S: f64 = 3.2e7;
/// A second: of what a core does with one packet or byte.
const CORE_TIME_MAX_PS: f64 = 1e12;

/// What the letters before "bit" or "B" stand for.
const PREFIXES: [(&str, f64); 9] = [
    ("ki", 1024.0),
    ("mi", 1_048_576.0),
    ("gi", 1_073_741_824.0),
    ("ti", 1_099_511_627_776.0),
    ("k", 1e3),
    ("m", 1e6),
    ("g", 1e9),
    ("t", 1e12),
    ("", 1.0),
];

impl FromStr for Rate {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let Some(bps) = prefixed(text, "bit") else {
            // "bps" is bytes to tc and bits to most people.
            let meant = |unit: &str| Some(format!("{}bit", spelled(text, unit)?.to_ascii_lowercase()));
            let doubtful = ["bps", "b/s", "b"].into_iter().find_map(meant);
            return Err(match (doubtful, ["bit/s", "bit"].into_iter().find_map(meant)) {
                (Some(bits), _) => {
                    format!("{text:?} is no rate, as it may mean bits or bytes a second: write {bits}")
                }
                (None, Some(bits)) => format!("{text:?} is no rate: write {bits}"),
                (None, None) => format!("{text:?} is no rate: write it as 500mbit or 1gbit"),
            });
        };
        if !(1.0..=RATE_MAX_BPS as f64).contains(&bps) {
            let most = RATE_MAX_BPS / 1_000_000_000_000;
            return Err(format!(
                "{text:?} is an impossible rate: at least 1 bit, at most {most} Tbit a second"
            ));
        }
        Ok(Self(bps.round() as u64))
    }
}

impl FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let bytes =
            prefixed(text, "b").filter(|bytes| *bytes <= SIZE_MAX_BYTES).ok_or_else(|| {
                match spelled(text, "b").or_else(|| spelled(text, "")) {
                    Some(number) => format!("{text:?} is no size: write {number}B"),
                    None => format!("{text:?} is no size: write it as 4KB, 25MB or 100MiB"),
                }
            })?;
        Ok(Self(bytes.round() as u64))
    }
}

impl FromStr for Time {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let units = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
        let seconds = number(text, &units)
            .filter(|seconds| *seconds <= TIME_MAX_S)
            .ok_or_else(|| format!("{text:?} is no time: a number with ns, us, ms or s, as in \"10us\""))?;
        Ok(Self(Duration::from_nanos((seconds * 1e9).round() as u64)))
    }
}

impl FromStr for CoreTime {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let units = [("ps", 1.0), ("ns", 1e3), ("us", 1e6), ("ms", 1e9)];
        let picos = number(text, &units).filter(|picos| *picos <= CORE_TIME_MAX_PS).ok_or_else(|| {
            format!("{text:?} is no time of a core: a number with ps, ns, us or ms, as in \"17.5ns\"")
        })?;
        Ok(Self(picos.round() as u64))
    }
}

impl FromStr for Share {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        number(text, &[("%", 0.01)])
            .and_then(Self::new)
            .ok_or_else(|| format!("{text:?} is no share: \"0%\" to \"100%\", or a number from 0 to 1"))
    }
}

impl Share {
    fn new(share: f64) -> Option<Self> {
        (0.0..=1.0).contains(&share).then_some(Self(share))
    }
}

/// The number before one of `units`, in that unit; not negative.
fn number(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let lower = text.to_ascii_lowercase();
    let (digits, factor) =
        units.iter().find_map(|(unit, factor)| Some((lower.strip_suffix(unit)?, *factor)))?;
    let number: f64 = digits.replace('_', "").parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some(number * factor)
}

/// [`number`], before `unit` with or without a prefix.
fn prefixed(text: &str, unit: &str) -> Option<f64> {
    let lower = text.to_ascii_lowercase();
    number(lower.strip_suffix(unit)?, &PREFIXES)
}

/// The number and prefix of a quantity that has `unit` and maybe blanks, without both.
fn spelled(text: &str, unit: &str) -> Option<String> {
    let mut close: String = text.split_whitespace().collect();
    close.truncate(close.to_ascii_lowercase().strip_suffix(unit)?.len());
    prefixed(&close, "").map(|_| close)
}

macro_rules! deserialized_from_text {
    ($name:ident, $what:literal) => {
        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Text;
                impl Visitor<'_> for Text {
                    type Value = $name;
                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str($what)
                    }
                    fn visit_str<E: Error>(self, text: &str) -> Result<$name, E> {
                        text.parse().map_err(E::custom)
                    }
                }
                deserializer.deserialize_str(Text)
            }
        }
    };
}

deserialized_from_text!(Rate, "a rate, as in \"100Gbit\"");
deserialized_from_text!(Size, "a size, as in \"4MB\"");
deserialized_from_text!(Time, "a time, as in \"10us\"");
deserialized_from_text!(CoreTime, "a time, as in \"17.5ns\"");

impl<'de> Deserialize<'de> for Share {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrNumber;
        impl Visitor<'_> for TextOrNumber {
            type Value = Share;
            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a share, as in \"0.1%\" or 0.001")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Share, E> {
                text.parse().map_err(E::custom)
            }
            fn visit_f64<E: Error>(self, share: f64) -> Result<Share, E> {
                Share::new(share).ok_or_else(|| E::custom(format!("{share} is no share: 0 to 1")))
            }
            fn visit_i64<E: Error>(self, share: i64) -> Result<Share, E> {
                self.visit_f64(share as f64)
            }
        }
        deserializer.deserialize_any(TextOrNumber)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: FromStr<Err = String>>(text: &str) -> Result<T, String> {
        text.parse()
    }

    #[test]
    fn quantities_are_read_with_their_units() {
        assert_eq!(read("100Gbit"), Ok(Rate(100_000_000_000)));
        assert_eq!(read("2.5mbit"), Ok(Rate(2_500_000)));
        assert_eq!(read("1kibit"), Ok(Rate(1024)));
        assert_eq!(read("2_500bit"), Ok(Rate(2500)));
        assert_eq!(read("4MB"), Ok(Size(4_000_000)));
        assert_eq!(read("64KiB"), Ok(Size(65_536)));
        assert_eq!(read("10us"), Ok(Time(Duration::from_micros(10))));
        assert_eq!(read("1.5s"), Ok(Time(Duration::from_millis(1500))));
        assert_eq!(read("0.1%"), Ok(Share(0.001)));
        assert_eq!(read("17.5ns"), Ok(CoreTime(17_500)));
        assert_eq!(read::<CoreTime>("76ps"), read("0.076ns"));
    }

    #[test]
    fn another_spelling_is_refused_with_the_cure() {
        // Bytes to tc, and bits to most people: a guess would be wrong by eight.
        for (text, bits) in [
            ("10gbps", "10gbit"),
            ("1.5 Gibps", "1.5gibit"),
            ("10Gb/s", "10gbit"),
            ("10GB/s", "10gbit"),
            ("100Gb", "100gbit"),
        ] {
            let told = format!("{text:?} is no rate, as it may mean bits or bytes a second: write {bits}");
            assert_eq!(read::<Rate>(text), Err(told));
        }
        for (text, bits) in [("10 Gbit", "10gbit"), ("10Gbit/s", "10gbit"), (" 2.5 Mbit/s", "2.5mbit")] {
            assert_eq!(read::<Rate>(text), Err(format!("{text:?} is no rate: write {bits}")));
        }
        for (text, size) in [("25 MB", "25MB"), ("4k", "4kB"), ("4096", "4096B"), ("1 GiB", "1GiB")] {
            assert_eq!(read::<Size>(text), Err(format!("{text:?} is no size: write {size}")));
            assert!(read::<Size>(size).is_ok());
        }
    }

    #[test]
    fn impossible_quantities_are_refused() {
        assert_eq!(read("8Tbit"), Ok(Rate(RATE_MAX_BPS)));
        for text in
            ["8.001Tbit", "0bit", "-1Gbit", "nanGbit", "1e99Gbit", "100", "fast", "", "Gbit", "fastbps"]
        {
            assert!(read::<Rate>(text).is_err(), "{text}");
        }
        for text in ["-4MB", "4", "1e30GB", "MB"] {
            assert!(read::<Size>(text).is_err(), "{text}");
        }
        for text in ["-1s", "1", "1h", "infs"] {
            assert!(read::<Time>(text).is_err(), "{text}");
        }
        for text in ["-1ns", "1", "2s", "1001ms"] {
            assert!(read::<CoreTime>(text).is_err(), "{text}");
        }
        assert!(read::<Share>("101%").is_err());
        assert!(Share::new(-0.1).is_none());
    }
}
