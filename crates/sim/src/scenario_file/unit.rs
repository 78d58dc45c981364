//! Quantities as people write them: `"100Gbit"`, `"4MB"`, `"10us"`, `"0.1%"`.

use std::str::FromStr;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error, Visitor};

use crate::net::RATE_MAX_BPS;

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

/// A year.
const TIME_MAX_S: f64 = 3.2e7;
/// A second: of what a core does with one packet or byte.
const CORE_TIME_MAX_PS: f64 = 1e12;

impl Rate {
    fn parse(text: &str) -> Result<Self, String> {
        let units = [("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3), ("tbit", 1e12), ("bit", 1.0)];
        let text = text.strip_suffix("/s").unwrap_or(text);
        let bps = number(text, &units).ok_or_else(|| match ambiguous(text) {
            Some(bits) => format!("{text:?} may mean bits or bytes a second: write {bits}"),
            None => format!("{text:?} is no rate: write it as 500mbit or 1gbit"),
        })?;
        if !(1.0..=RATE_MAX_BPS as f64).contains(&bps) {
            let most = RATE_MAX_BPS / 1_000_000_000_000;
            return Err(format!(
                "{text:?} is an impossible rate: at least 1 bit, at most {most} Tbit a second"
            ));
        }
        Ok(Self(bps.round() as u64))
    }
}

/// The unambiguous spelling of a number with "bps": tc means bytes by it, and most people bits.
fn ambiguous(text: &str) -> Option<String> {
    let text = text.to_lowercase();
    let prefixed = text.strip_suffix("bps")?;
    let number = prefixed.strip_suffix(['k', 'm', 'g', 't']).unwrap_or(prefixed).trim_end();
    number.parse::<f64>().is_ok().then(|| format!("{prefixed}bit"))
}

impl Size {
    fn parse(text: &str) -> Result<Self, String> {
        let units = [
            ("kib", 1024.0),
            ("mib", 1048576.0),
            ("gib", 1073741824.0),
            ("kb", 1e3),
            ("mb", 1e6),
            ("gb", 1e9),
            ("b", 1.0),
        ];
        let bytes = number(text, &units)
            .filter(|bytes| *bytes <= 1e15)
            .ok_or_else(|| format!("{text:?} is no size: a number with B, kB, MB, GB, KiB, MiB or GiB"))?;
        Ok(Self(bytes.round() as u64))
    }
}

impl Time {
    fn parse(text: &str) -> Result<Self, String> {
        let units = [("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
        let seconds = number(text, &units)
            .filter(|seconds| *seconds <= TIME_MAX_S)
            .ok_or_else(|| format!("{text:?} is no time: a number with ns, us, ms or s, as in \"10us\""))?;
        Ok(Self(Duration::from_nanos((seconds * 1e9).round() as u64)))
    }
}

impl CoreTime {
    fn parse(text: &str) -> Result<Self, String> {
        let units = [("ps", 1.0), ("ns", 1e3), ("us", 1e6), ("ms", 1e9)];
        let picos = number(text, &units).filter(|picos| *picos <= CORE_TIME_MAX_PS).ok_or_else(|| {
            format!("{text:?} is no time of a core: a number with ps, ns, us or ms, as in \"17.5ns\"")
        })?;
        Ok(Self(picos.round() as u64))
    }
}

impl Share {
    fn parse(text: &str) -> Result<Self, String> {
        number(text, &[("%", 0.01)])
            .and_then(Self::new)
            .ok_or_else(|| format!("{text:?} is no share: \"0%\" to \"100%\", or a number from 0 to 1"))
    }

    fn new(share: f64) -> Option<Self> {
        (0.0..=1.0).contains(&share).then_some(Self(share))
    }
}

/// The number before one of `units`, in that unit; not negative.
fn number(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let lower = text.trim().to_ascii_lowercase();
    let (digits, factor) =
        units.iter().find_map(|(unit, factor)| Some((lower.strip_suffix(unit)?, *factor)))?;
    let number: f64 = digits.trim_end().replace('_', "").parse().ok()?;
    (number.is_finite() && number >= 0.0).then_some(number * factor)
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
                        $name::parse(text).map_err(E::custom)
                    }
                }
                deserializer.deserialize_str(Text)
            }
        }
    };
}

/// As on a command line.
impl FromStr for Rate {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }
}

/// As on a command line.
impl FromStr for Size {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Self::parse(text)
    }
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
                Share::parse(text).map_err(E::custom)
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

    #[test]
    fn quantities_are_read_with_their_units() {
        assert_eq!(Rate::parse("100Gbit"), Ok(Rate(100_000_000_000)));
        assert_eq!(Rate::parse("2.5 Mbit/s"), Ok(Rate(2_500_000)));
        assert_eq!(Size::parse("4MB"), Ok(Size(4_000_000)));
        assert_eq!(Size::parse("64KiB"), Ok(Size(65_536)));
        assert_eq!(Time::parse("10us"), Ok(Time(Duration::from_micros(10))));
        assert_eq!(Time::parse("1.5s"), Ok(Time(Duration::from_millis(1500))));
        assert_eq!(Share::parse("0.1%"), Ok(Share(0.001)));
        assert_eq!(CoreTime::parse("17.5ns"), Ok(CoreTime(17_500)));
        assert_eq!(CoreTime::parse("76ps"), CoreTime::parse("0.076ns"));
    }

    #[test]
    fn impossible_quantities_are_refused() {
        assert_eq!(Rate::parse("8Tbit"), Ok(Rate(RATE_MAX_BPS)));
        for text in ["8.001Tbit", "0bit", "-1Gbit", "nanGbit", "1e99Gbit", "100", "fast", "", "Gbit"] {
            assert!(Rate::parse(text).is_err(), "{text}");
        }
        for text in ["-4MB", "4", "1e30GB", "MB"] {
            assert!(Size::parse(text).is_err(), "{text}");
        }
        for text in ["-1s", "1", "1h", "infs"] {
            assert!(Time::parse(text).is_err(), "{text}");
        }
        for text in ["-1ns", "1", "2s", "1001ms"] {
            assert!(CoreTime::parse(text).is_err(), "{text}");
        }
        assert!(Share::parse("101%").is_err());
        assert!(Share::new(-0.1).is_none());
    }
}
