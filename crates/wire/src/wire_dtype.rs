//! How the elements of a job's float tensors travel.

use crate::{Dtype, WireError};

/// Type of a float tensor's elements in a payload. Every worker of a job uses the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WireDtype {
    /// Four bytes an element, block floating point (SwitchML §4.6).
    #[default]
    Int32,
    /// Two bytes an element; the payload begins with its block's exponent.
    Bfloat16,
}

/// What precedes the elements of a bfloat16 payload: the exponent, and two bytes that are zero.
const PREFIX_BYTES: usize = 4;

impl WireDtype {
    /// Every type.
    pub const ALL: [Self; 2] = [Self::Int32, Self::Bfloat16];

    /// NumPy's name of the type.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Int32 => "int32",
            Self::Bfloat16 => "bfloat16",
        }
    }

    /// How a tensor of `dtype` travels in a job of this type: integers are never rounded.
    #[must_use]
    pub const fn of_tensor(self, dtype: Dtype) -> Self {
        match dtype {
            Dtype::Int32 => Self::Int32,
            Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16 => self,
        }
    }

    /// Elements of a full payload in a job whose chunks have `size_class`, one of [`CHUNK_ELEMENTS`](crate::CHUNK_ELEMENTS).
    #[must_use]
    pub const fn chunk_elements(self, size_class: usize) -> usize {
        match self {
            Self::Int32 => size_class,
            Self::Bfloat16 => 2 * size_class,
        }
    }

    /// Length of a payload of `elements`, which is nothing for none.
    #[must_use]
    pub const fn payload_bytes(self, elements: usize) -> usize {
        match self {
            Self::Int32 => 4 * elements,
            Self::Bfloat16 if elements == 0 => 0,
            Self::Bfloat16 => PREFIX_BYTES + 2 * elements,
        }
    }

    /// Elements of a payload of `bytes`; `None` when none has this length.
    pub(crate) fn payload_elements(self, bytes: usize) -> Option<usize> {
        let elements = match self {
            Self::Int32 => bytes / 4,
            Self::Bfloat16 => bytes.saturating_sub(PREFIX_BYTES) / 2,
        };
        (self.payload_bytes(elements) == bytes).then_some(elements)
    }
}

impl core::str::FromStr for WireDtype {
    type Err = WireError;

    fn from_str(name: &str) -> Result<Self, WireError> {
        Self::ALL
            .into_iter()
            .find(|wire_dtype| wire_dtype.name() == name)
            .ok_or(WireError::Field("wire_dtype"))
    }
}

/// The exponent and the elements of a bfloat16 payload; `None` for an empty payload, or one whose zeros are none.
#[must_use]
pub fn bfloat16_payload(payload: &[u8]) -> Option<(i16, &[u8])> {
    let ([e0, e1, 0, 0], elements) = payload.split_first_chunk::<PREFIX_BYTES>()? else { return None };
    Some((i16::from_le_bytes([*e0, *e1]), elements))
}

/// Writes what precedes the elements of a bfloat16 payload, and returns where they go.
///
/// # Panics
/// When the payload is shorter than that.
pub fn begin_bfloat16_payload(payload: &mut [u8], exponent: i16) -> &mut [u8] {
    let (prefix, elements) = payload.split_at_mut(PREFIX_BYTES);
    let [e0, e1] = exponent.to_le_bytes();
    prefix.copy_from_slice(&[e0, e1, 0, 0]);
    elements
}
