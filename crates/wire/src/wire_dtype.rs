//! How the elements of a tensor travel.

use crate::{Dtype, WireError};

/// How the elements of a job's large float tensors are written in a payload. Every worker of a job
/// uses the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum WireDtype {
    /// As integers of four bytes, with one exponent for all floats of a packet: block floating
    /// point (SwitchML §4.6).
    SharedExponent,
    /// Two bytes an element; the payload begins with its block's exponent, but for those of ATP and
    /// GOAT.
    Bfloat16,
    /// A byte for each element: blocks of [`PACKED_BLOCK`] integers that share a step.
    Int8,
    /// Half a byte for each element, in blocks as for [`WireDtype::Int8`].
    Int4,
    /// In the tensor's own type, and so is the sum: each element is right to its own magnitude.
    #[default]
    Native,
}

/// Float tensors of at most this many elements travel in their own type in every job, however large
/// ones do. A vector of metrics, a norm, a bias is as long as that or shorter, and its elements
/// have magnitudes of their own. The large buckets of gradients are longer. With four ranks on one
/// machine such a tensor takes half the time of one that spends a round trip on its exponents. A
/// tensor of 16,384 elements takes a tenth more than as a block, since the switch gathers and sums
/// in floating point.
pub const NATIVE_ELEMENTS_MAX: usize = 4096;

/// Elements that share a step, where they travel as int8 or int4.
pub const PACKED_BLOCK: usize = 32;
/// The blocks of such a payload come in fours, whose steps are a word.
const PACKED_GROUP: usize = 4 * PACKED_BLOCK;

/// The bytes before the elements of a bfloat16 payload: the exponent, and two bytes that are zero.
const PREFIX_BYTES: usize = 4;

impl WireDtype {
    /// Every one.
    pub const ALL: [Self; 5] = [Self::SharedExponent, Self::Bfloat16, Self::Int8, Self::Int4, Self::Native];

    /// Its name on command lines and in messages.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SharedExponent => "shared_exponent",
            Self::Bfloat16 => "bfloat16",
            Self::Int8 => "int8",
            Self::Int4 => "int4",
            Self::Native => "native",
        }
    }

    /// How a tensor of `elements` elements travels in a job of this wire dtype: the same on every
    /// worker.
    #[must_use]
    pub const fn of_tensor(self, dtype: Dtype, elements: usize) -> Self {
        match dtype {
            // Integers of four bytes need no exponent.
            Dtype::Int32 => Self::SharedExponent,
            Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16 if elements > NATIVE_ELEMENTS_MAX => self,
            _ => Self::Native,
        }
    }

    /// Whether the elements travel as integers in blocks, each with its own step.
    #[must_use]
    pub const fn is_packed(self) -> bool {
        matches!(self, Self::Int8 | Self::Int4)
    }

    /// Whether a tensor of `dtype` can travel so.
    pub(crate) const fn carries(self, dtype: Dtype) -> bool {
        match dtype {
            Dtype::Int32 => matches!(self, Self::SharedExponent),
            Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16 => true,
            Dtype::Float64 | Dtype::Int64 | Dtype::Uint8 | Dtype::Int8 => matches!(self, Self::Native),
        }
    }

    /// Elements of a full payload in a job whose chunks have `size_class`, one of
    /// [`CHUNK_ELEMENTS`](crate::CHUNK_ELEMENTS).
    #[must_use]
    pub const fn chunk_elements(self, size_class: usize, dtype: Dtype) -> usize {
        match self {
            Self::SharedExponent => size_class,
            Self::Bfloat16 => 2 * size_class,
            Self::Int8 | Self::Int4 => PACKED_GROUP * self.groups(size_class),
            Self::Native => 4 * size_class / dtype.element_bytes(),
        }
    }

    /// Length of a payload of `elements`, which is nothing for none.
    #[must_use]
    pub const fn payload_bytes(self, elements: usize, dtype: Dtype) -> usize {
        match self {
            Self::SharedExponent => 4 * elements,
            Self::Bfloat16 if elements == 0 => 0,
            Self::Bfloat16 => PREFIX_BYTES + 2 * elements,
            Self::Int8 | Self::Int4 => elements / PACKED_BLOCK * self.block_bytes(),
            Self::Native => elements * dtype.element_bytes(),
        }
    }

    /// Length of the longest payload in a job of this wire dtype, whose chunks have `size_class`.
    #[must_use]
    pub const fn payload_bytes_max(self, size_class: usize) -> usize {
        match self {
            Self::SharedExponent | Self::Native => 4 * size_class,
            Self::Bfloat16 => PREFIX_BYTES + 4 * size_class,
            // Among the shortest chunks those as int8 are the longest.
            Self::Int8 | Self::Int4 if self.groups(size_class) * self.group_bytes() > 4 * size_class => {
                self.groups(size_class) * self.group_bytes()
            }
            Self::Int8 | Self::Int4 => 4 * size_class,
        }
    }

    /// Words of 32 bits in which a switch holds the sum of a chunk, whichever of its tensors a job
    /// of this wire dtype sends. An element that is rounded on its way is added as an int32.
    #[must_use]
    pub const fn sum_words(self, size_class: usize) -> usize {
        match self {
            Self::SharedExponent | Self::Native => size_class,
            Self::Bfloat16 => 2 * size_class,
            Self::Int8 | Self::Int4 => self.payload_bytes_max(size_class) / 4,
        }
    }

    /// Elements of a payload of `bytes`; `None` when none has this length.
    pub(crate) fn payload_elements(self, bytes: usize, dtype: Dtype) -> Option<usize> {
        let elements = match self {
            Self::SharedExponent => bytes / 4,
            Self::Bfloat16 => bytes.saturating_sub(PREFIX_BYTES) / 2,
            Self::Int8 | Self::Int4 => bytes / self.block_bytes() * PACKED_BLOCK,
            Self::Native => bytes / dtype.element_bytes(),
        };
        (self.payload_bytes(elements, dtype) == bytes).then_some(elements)
    }

    /// A byte for a block's step, and its integers.
    const fn block_bytes(self) -> usize {
        match self {
            Self::Int4 => 1 + PACKED_BLOCK / 2,
            _ => 1 + PACKED_BLOCK,
        }
    }

    const fn group_bytes(self) -> usize {
        PACKED_GROUP / PACKED_BLOCK * self.block_bytes()
    }

    /// As many groups as have room where a bfloat16 payload has.
    const fn groups(self, size_class: usize) -> usize {
        (PREFIX_BYTES + 4 * size_class) / self.group_bytes()
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

/// The exponent and the elements of a bfloat16 payload; `None` for an empty payload, or one whose
/// zeros are none.
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
