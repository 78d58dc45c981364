//! What the ranks of a job must agree on.
//!
//! Each setting is one row of the table below: the struct, its comparison and its message follow
//! from it.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use fanin_wire::{LossBound, Security, WireDtype};

use super::Malformed;

/// The rows: a field, its type, its number in messages, and its name for people with where a user
/// says it. Rows are compared in their order.
macro_rules! agreed {
    ($($(#[$doc:meta])* $field:ident: $type:ty = $number:literal, $name:literal;)*) => {
        /// What a rank asks for, and all others must ask for, too.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct Agreed {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl Agreed {
            /// The first setting that two ranks do not agree on, and what each has.
            #[must_use]
            pub fn differs(&self, other: &Self) -> Option<(&'static str, String, String)> {
                $(if !self.$field.agrees(&other.$field) {
                    return Some(($name, self.$field.shown(), other.$field.shown()));
                })*
                None
            }

            /// The number and the value of each setting, for a message.
            #[must_use]
            pub fn values(&self) -> Vec<(u32, Vec<u8>)> {
                Vec::from([$(($number, self.$field.written())),*])
            }

            /// What another process wrote with [`Self::values`].
            ///
            /// # Errors
            /// When a setting is missing, is out of range, or is none that this build knows: it
            /// must not be ignored.
            pub fn read<'a>(
                values: impl IntoIterator<Item = (u32, &'a [u8])>,
            ) -> Result<Self, Malformed> {
                $(let mut $field = None;)*
                for (number, value) in values {
                    match number {
                        $($number => $field = Some(
                            Setting::read(value).ok_or(Malformed(stringify!($field)))?
                        ),)*
                        _ => return Err(Malformed("settings")),
                    }
                }
                Ok(Self { $($field: $field.ok_or(Malformed(stringify!($field)))?,)* })
            }
        }
    };
}

agreed! {
    /// Packets of a rank that may be in flight in a shard, where the user overrides what is
    /// computed. A rank that says nothing agrees with any number.
    in_flight: Option<u16> = 1, "packets in flight (in_flight, or FANIN_IN_FLIGHT)";
    /// How the elements of large float tensors travel.
    wire_dtype: WireDtype = 2, "wire dtype (wire_dtype, or FANIN_WIRE_DTYPE)";
    /// How packets are secured.
    security: Security = 3, "security (security, or FANIN_SECURITY)";
    /// What each rank's part of a float tensor may lose. Above nothing, floats travel as they are.
    loss_bound: LossBound = 4, "loss bound (loss_bound, or FANIN_LOSS_BOUND)";
    /// How tensors are cut among the job's services, and which of them this one is: a fingerprint.
    /// Zero where a service is the only one.
    plan: u64 = 5, "plan: the same switches in the same order (switch, or FANIN_SWITCH)";
    /// Elements of each part of the model that is planned by itself; with none, the stream is cut
    /// into equal parts.
    sub_models: Vec<u64> = 6, "sub-models (sub_models, or FANIN_SUB_MODELS)";
}

/// Most parts of a model that a message lists.
const SHOWN_MAX: usize = 8;

/// The value of a setting.
trait Setting: Sized + PartialEq {
    fn agrees(&self, other: &Self) -> bool {
        self == other
    }
    /// For people.
    fn shown(&self) -> String;
    fn written(&self) -> Vec<u8>;
    /// `None` for what [`Self::written`] does not write.
    fn read(written: &[u8]) -> Option<Self>;
}

impl Setting for Option<u16> {
    fn agrees(&self, other: &Self) -> bool {
        self.zip(*other).is_none_or(|(one, other)| one == other)
    }

    fn shown(&self) -> String {
        self.map_or_else(|| "none".into(), |count| count.to_string())
    }

    fn written(&self) -> Vec<u8> {
        self.map_or_else(Vec::new, |count| count.to_le_bytes().to_vec())
    }

    fn read(written: &[u8]) -> Option<Self> {
        match written {
            [] => Some(None),
            bytes => Some(Some(u16::from_le_bytes(bytes.try_into().ok()?))),
        }
    }
}

impl Setting for WireDtype {
    fn shown(&self) -> String {
        self.name().into()
    }

    fn written(&self) -> Vec<u8> {
        self.name().into()
    }

    fn read(written: &[u8]) -> Option<Self> {
        core::str::from_utf8(written).ok()?.parse().ok()
    }
}

impl Setting for Security {
    fn shown(&self) -> String {
        self.name().into()
    }

    fn written(&self) -> Vec<u8> {
        self.name().into()
    }

    fn read(written: &[u8]) -> Option<Self> {
        Self::from_name(core::str::from_utf8(written).ok()?)
    }
}

impl Setting for LossBound {
    fn shown(&self) -> String {
        self.to_string()
    }

    fn written(&self) -> Vec<u8> {
        self.millionths().to_le_bytes().to_vec()
    }

    fn read(written: &[u8]) -> Option<Self> {
        Self::from_millionths(u32::from_le_bytes(written.try_into().ok()?))
    }
}

impl Setting for u64 {
    fn shown(&self) -> String {
        format!("{self:016x}")
    }

    fn written(&self) -> Vec<u8> {
        self.to_le_bytes().to_vec()
    }

    fn read(written: &[u8]) -> Option<Self> {
        Some(Self::from_le_bytes(written.try_into().ok()?))
    }
}

impl Setting for Vec<u64> {
    fn shown(&self) -> String {
        let listed: Vec<String> = self.iter().take(SHOWN_MAX).map(ToString::to_string).collect();
        match self.len() {
            0 => "none".into(),
            count if count > SHOWN_MAX => {
                format!("{} and {} more", listed.join(", "), count - SHOWN_MAX)
            }
            _ => listed.join(", "),
        }
    }

    fn written(&self) -> Vec<u8> {
        self.iter().flat_map(|part| part.to_le_bytes()).collect()
    }

    fn read(written: &[u8]) -> Option<Self> {
        written.chunks(8).map(u64::read).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(values: &[(u32, Vec<u8>)]) -> Result<Agreed, Malformed> {
        Agreed::read(values.iter().map(|(number, value)| (*number, value.as_slice())))
    }

    #[test]
    fn what_one_rank_writes_another_process_reads() {
        let bound = LossBound::from_millionths(999_999).expect("below one");
        for in_flight in [None, Some(0), Some(u16::MAX)] {
            let agreed = Agreed {
                in_flight,
                wire_dtype: WireDtype::Int8,
                security: Security::Encrypt,
                loss_bound: bound,
                plan: u64::MAX - 1,
                sub_models: [1, 1 << 40].into(),
            };
            assert_eq!(read(&agreed.values()), Ok(agreed));
        }
        assert_eq!(read(&Agreed::default().values()), Ok(Agreed::default()));
    }

    #[test]
    fn a_setting_that_is_missing_unknown_or_out_of_range_is_not_taken_for_the_default() {
        let values = Agreed::default().values();
        for index in 0..values.len() {
            let mut others = values.clone();
            let (number, _) = others.remove(index);
            assert!(read(&others).is_err(), "without {number}");
            others.push((number, [7; 3].into()));
            assert!(read(&others).is_err(), "{number} of three bytes");
        }
        let unknown = [values, [(99, Vec::new())].into()].concat();
        assert_eq!(read(&unknown), Err(Malformed("settings")));
        let whole = (4, 1_000_000_u32.to_le_bytes().to_vec());
        assert_eq!(read(&[whole]), Err(Malformed("loss_bound")));
    }
}
