//! Rates, sizes, times and shares as people write them: `"100Gbit"`, `"4MB"`, `"10us"`, `"0.1%"`.
//!
//! Scenario files, flags of `fanin` and a rank's settings have this one grammar: a number, and a
//! unit right behind it, in any case. A number is digits, with at most one dot and any `_` between
//! them. Rates are in bits, as `tc` writes them. Another spelling is refused, and the error says
//! what to write.
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

/// The lowest rate: a smaller number lacks its prefix.
const RATE_MIN_BPS: u64 = 1000;
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
        if !(RATE_MIN_BPS as f64..=RATE_MAX_BPS as f64).contains(&bps) {
            let (least, most) = (RATE_MIN_BPS / 1000, RATE_MAX_BPS / 1_000_000_000_000);
            return Err(format!("{text:?} is an impossible rate: at least {least}kbit, at most {most}Tbit"));
        }
        Ok(Self(bps.round() as u64))
    }
}

impl FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let bytes =
            prefixed(text, "b").ok_or_else(|| match spelled(text, "b").or_else(|| spelled(text, "")) {
                Some(number) => format!("{text:?} is no size: write {number}B"),
                None => format!("{text:?} is no size: write it as 4KB, 25MB or 100MiB"),
            })?;
        if bytes > SIZE_MAX_BYTES || bytes > 0.0 && bytes < 1.0 {
            let most = SIZE_MAX_BYTES / 1e12;
            return Err(format!("{text:?} is an impossible size: 0B, or at least 1B, at most {most}TB"));
        }
        Ok(Self(bytes.round() as u64))
    }
}

impl FromStr for Time {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let units = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
        let seconds = number(text, &units).ok_or_else(|| {
            let form = "a number with ns, us, ms or s, as in \"10us\"";
            format!("{text:?} is no time: {}", closed::<Self>(text).unwrap_or(form.into()))
        })?;
        if seconds > TIME_MAX_S {
            return Err(format!("{text:?} is an impossible time: at most {TIME_MAX_S}s"));
        }
        Ok(Self(Duration::from_nanos((seconds * 1e9).round() as u64)))
    }
}

impl FromStr for CoreTime {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let units = [("ps", 1.0), ("ns", 1e3), ("us", 1e6), ("ms", 1e9)];
        let picos = number(text, &units).ok_or_else(|| {
            let form = "a number with ps, ns, us or ms, as in \"17.5ns\"";
            format!("{text:?} is no time of a core: {}", closed::<Self>(text).unwrap_or(form.into()))
        })?;
        if picos > CORE_TIME_MAX_PS {
            let most = CORE_TIME_MAX_PS / 1e9;
            return Err(format!("{text:?} is an impossible time of a core: at most {most}ms"));
        }
        Ok(Self(picos.round() as u64))
    }
}

impl FromStr for Share {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        number(text, &[("%", 0.01)]).and_then(Self::new).ok_or_else(|| {
            let form = "\"0%\" to \"100%\", or a number from 0 to 1";
            format!("{text:?} is no share: {}", closed::<Self>(text).unwrap_or(form.into()))
        })
    }
}

impl Share {
    fn new(share: f64) -> Option<Self> {
        (0.0..=1.0).contains(&share).then_some(Self(share))
    }
}

/// The number before one of `units`, in that unit.
fn number(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let lower = text.to_ascii_lowercase();
    let (digits, factor) =
        units.iter().find_map(|(unit, factor)| Some((lower.strip_suffix(unit)?, *factor)))?;
    let bytes = digits.as_bytes();
    let is_digit = |at: usize| bytes.get(at).is_some_and(u8::is_ascii_digit);
    let is_part = |at| match bytes[at] {
        b'_' | b'.' => at > 0 && is_digit(at - 1) && is_digit(at + 1),
        _ => is_digit(at),
    };
    if !(0..bytes.len()).all(is_part) {
        return None;
    }
    // Refuses none, and two dots.
    let number: f64 = digits.replace('_', "").parse().ok()?;
    number.is_finite().then_some(number * factor)
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

/// The cure of a quantity with blanks, if it has no other fault.
fn closed<T: FromStr>(text: &str) -> Option<String> {
    let close: String = text.split_whitespace().collect();
    (close != text && close.parse::<T>().is_ok()).then(|| format!("write {close}"))
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
        assert_eq!(read::<Time>("10 us"), Err("\"10 us\" is no time: write 10us".into()));
        assert_eq!(read::<CoreTime>("2 ns"), Err("\"2 ns\" is no time of a core: write 2ns".into()));
        assert_eq!(read::<Share>(" 1%"), Err("\" 1%\" is no share: write 1%".into()));
    }

    #[test]
    fn a_number_is_digits_with_one_dot_between_them() {
        for number in ["1e3", "+1", "-1", ".5", "1.", "1_", "_1", "1__0", "1._5", "1.2.3", "1,5", "nan", ""] {
            assert!(read::<Rate>(&format!("{number}gbit")).is_err(), "{number}");
            assert!(read::<Size>(&format!("{number}GB")).is_err(), "{number}");
            assert!(read::<Time>(&format!("{number}s")).is_err(), "{number}");
            assert!(read::<Share>(&format!("{number}%")).is_err(), "{number}");
        }
        assert_eq!(read("1_000.2_5kbit"), Ok(Rate(1_000_250)));
    }

    #[test]
    fn impossible_quantities_are_refused() {
        assert_eq!(read("8Tbit"), Ok(Rate(RATE_MAX_BPS)));
        assert_eq!(read("1kbit"), Ok(Rate(RATE_MIN_BPS)));
        assert_eq!(read("1000TB"), Ok(Size(1_000_000_000_000_000)));
        for text in ["2000TB", "1000.1TB", "0.4B", "0.0009KB"] {
            let told = format!("{text:?} is an impossible size: 0B, or at least 1B, at most 1000TB");
            assert_eq!(read::<Size>(text), Err(told));
        }
        let told = "\"40000000s\" is an impossible time: at most 32000000s";
        assert_eq!(read::<Time>("40000000s"), Err(told.into()));
        let told = "\"1001ms\" is an impossible time of a core: at most 1000ms";
        assert_eq!(read::<CoreTime>("1001ms"), Err(told.into()));
        for text in [
            "8.001Tbit",
            "0bit",
            "10bit",
            "999bit",
            "-1Gbit",
            "nanGbit",
            "1e99Gbit",
            "100",
            "fast",
            "",
            "Gbit",
            "fastbps",
        ] {
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
