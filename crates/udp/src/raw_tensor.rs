//! A tensor that somebody else owns.

use fanin_protocol::Elements;
use fanin_wire::Dtype;
use std::ops::Range;
use std::ptr::NonNull;

/// The memory of a contiguous tensor, by pointer: nothing is copied, and nobody's lifetime is known here.
#[derive(Debug)]
pub struct RawTensor {
    address: NonNull<u8>,
    elements: usize,
    dtype: Dtype,
}

/// Why a pointer cannot be a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RawTensorError {
    /// There are elements, but the address is null.
    #[error("a tensor of {0} elements at a null address")]
    Null(usize),
    /// The address is not a multiple of the size of an element.
    #[error("address {address:#x} is not aligned for {}: it must be a multiple of {}", dtype.name(), dtype.element_bytes())]
    Misaligned {
        /// The address.
        address: usize,
        /// Type of the elements.
        dtype: Dtype,
    },
    /// No memory is so large.
    #[error("a tensor of {0} elements does not fit into memory")]
    TooLarge(usize),
}

// SAFETY: the constructor's contract gives exclusive access to the memory, whichever thread uses it.
unsafe impl Send for RawTensor {}

impl RawTensor {
    /// The tensor of `elements` elements of type `dtype` at `address`.
    ///
    /// # Errors
    /// When the address is null or not aligned for the type, or the memory would wrap around.
    ///
    /// # Safety
    /// When this returns a tensor and that is submitted, the memory must stay valid for reads and writes, and nobody else
    /// may read or write it, until the submission's `done` was called or the tensor was dropped.
    pub unsafe fn new(address: *mut u8, elements: usize, dtype: Dtype) -> Result<Self, RawTensorError> {
        let bytes = elements.checked_mul(dtype.element_bytes());
        if bytes.is_none_or(|bytes| isize::try_from(bytes).is_err()) {
            return Err(RawTensorError::TooLarge(elements));
        }
        if elements == 0 {
            // Frameworks give an empty tensor any address.
            return Ok(Self { address: NonNull::<u64>::dangling().cast(), elements, dtype });
        }
        if !address.addr().is_multiple_of(dtype.element_bytes()) {
            return Err(RawTensorError::Misaligned { address: address.addr(), dtype });
        }
        let address = NonNull::new(address).ok_or(RawTensorError::Null(elements))?;
        Ok(Self { address, elements, dtype })
    }

    /// Number of elements.
    #[must_use]
    pub const fn elements(&self) -> usize {
        self.elements
    }

    /// Type of an element.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// The same memory as so many uint8.
    #[must_use]
    pub const fn into_bytes(self) -> Self {
        let elements = self.elements * self.dtype.element_bytes();
        Self { address: self.address, elements, dtype: Dtype::Uint8 }
    }

    /// The elements in `range`, as a tensor of their own.
    ///
    /// # Panics
    /// When the range is not within the tensor.
    ///
    /// # Safety
    /// Parts that overlap, and a part and its whole, must not be used at the same time.
    pub(crate) unsafe fn part(&self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.elements);
        // SAFETY: the range is within the tensor, whose size in bytes the constructor found to fit an isize.
        let address = unsafe { self.address.add(range.start * self.dtype.element_bytes()) };
        Self { address, elements: range.len(), dtype: self.dtype }
    }

    /// The tensor's memory.
    pub fn as_bytes(&mut self) -> &mut [u8] {
        let bytes = self.elements * self.dtype.element_bytes();
        // SAFETY: as for `slice`; every bit pattern is a number of any type.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), bytes) }
    }

    pub(crate) fn as_elements(&mut self) -> Elements<'_> {
        match self.dtype {
            // SAFETY: as `slice` demands, float32 is the type of the elements.
            Dtype::Float32 => Elements::Float32(unsafe { self.slice() }),
            // SAFETY: the bits of a float16 are a u16.
            Dtype::Float16 => Elements::Float16(unsafe { self.slice() }),
            // SAFETY: the bits of a bfloat16 are a u16.
            Dtype::Bfloat16 => Elements::Bfloat16(unsafe { self.slice() }),
            // SAFETY: int32 is the type of the elements.
            Dtype::Int32 => Elements::Int32(unsafe { self.slice() }),
            // SAFETY: float64 is the type of the elements.
            Dtype::Float64 => Elements::Float64(unsafe { self.slice() }),
            // SAFETY: int64 is the type of the elements.
            Dtype::Int64 => Elements::Int64(unsafe { self.slice() }),
            // SAFETY: uint8 is the type of the elements.
            Dtype::Uint8 => Elements::Uint8(unsafe { self.slice() }),
            // SAFETY: int8 is the type of the elements.
            Dtype::Int8 => Elements::Int8(unsafe { self.slice() }),
        }
    }

    /// # Safety
    /// `T` must be a plain number of `dtype.element_bytes()` bytes.
    unsafe fn slice<T>(&mut self) -> &mut [T] {
        debug_assert_eq!(size_of::<T>(), self.dtype.element_bytes());
        // SAFETY: the constructor checked alignment and size; its contract makes the memory valid and exclusively ours until
        // the tensor is gone; `&mut self` keeps two slices of one tensor apart, and every bit pattern is a number.
        unsafe { std::slice::from_raw_parts_mut(self.address.cast::<T>().as_ptr(), self.elements) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pointer_that_cannot_be_a_tensor_is_an_error() {
        let mut memory = [0u32; 4];
        let address = memory.as_mut_ptr().cast::<u8>();
        // SAFETY: none of these tensors is used.
        let new = |offset: usize, elements, dtype| unsafe {
            RawTensor::new(address.wrapping_add(offset), elements, dtype).map(|tensor| tensor.elements())
        };
        assert!(matches!(new(2, 1, Dtype::Float32), Err(RawTensorError::Misaligned { .. })));
        assert!(matches!(new(1, 1, Dtype::Bfloat16), Err(RawTensorError::Misaligned { .. })));
        assert_eq!(new(2, 1, Dtype::Bfloat16), Ok(1));
        assert_eq!(new(3, 0, Dtype::Int32), Ok(0));
        assert_eq!(new(0, usize::MAX / 2, Dtype::Int32), Err(RawTensorError::TooLarge(usize::MAX / 2)));
        // SAFETY: as above.
        let null = unsafe { RawTensor::new(std::ptr::null_mut(), 4, Dtype::Int32) };
        assert_eq!(null.err(), Some(RawTensorError::Null(4)));
    }

    #[test]
    fn parts_are_views_of_the_whole() {
        let mut memory: Vec<i32> = (0..10).collect();
        // SAFETY: `memory` outlives the tensor and is not touched meanwhile; the parts are disjoint.
        unsafe {
            let whole = RawTensor::new(memory.as_mut_ptr().cast(), 10, Dtype::Int32).unwrap();
            for (range, value) in [(2..5, 100), (5..10, 200)] {
                let mut part = whole.part(range);
                let Elements::Int32(elements) = part.as_elements() else { panic!("wrong type") };
                elements.fill(value);
            }
        }
        assert_eq!(memory, [0, 1, 100, 100, 100, 200, 200, 200, 200, 200]);
    }
}
