//! How many elements packets have, and how many bytes these take.

use fanin_wire::*;

#[test]
fn a_payload_of_int8_or_int4_is_whole_groups_and_fits_where_bfloat16_does() {
    let int8 = [(128, 132), (128, 132), (896, 924), (1280, 1320), (3968, 4092), (7936, 8184)];
    let int4 = [(128, 68), (384, 204), (1920, 1020), (2560, 1360), (7680, 4080), (15_360, 8160)];
    for (wire_dtype, expected) in [(WireDtype::Int8, int8), (WireDtype::Int4, int4)] {
        let of_class = CHUNK_ELEMENTS.map(|size_class| {
            let elements = wire_dtype.chunk_elements(size_class, Dtype::Float32);
            let bytes = wire_dtype.payload_bytes(elements, Dtype::Float32);
            let most = wire_dtype.payload_bytes_max(size_class);
            assert!(bytes <= most && most <= WireDtype::Bfloat16.payload_bytes_max(size_class));
            assert!(most <= 4 * wire_dtype.sum_words(size_class));
            assert!(elements.is_multiple_of(PACKED_BLOCK));
            (elements, bytes)
        });
        assert_eq!(of_class, expected);
        assert_eq!(chunk_elements_for_mtu(1500, wire_dtype), Some(352));
    }
}

#[test]
fn a_payload_has_as_many_bytes_whatever_the_type_of_its_elements() {
    for dtype in Dtype::ALL.into_iter().filter(|dtype| *dtype != Dtype::Int32) {
        for size_class in CHUNK_ELEMENTS {
            let elements = WireDtype::Native.chunk_elements(size_class, dtype);
            assert_eq!(WireDtype::Native.payload_bytes(elements, dtype), 4 * size_class);
        }
    }
}

#[test]
fn a_frame_of_1500_carries_336_elements_of_a_fragment_and_one_of_9000_carries_2048() {
    for (mtu, elements) in
        [(1500, Some(336)), (9000, Some(2048)), (1280, Some(256)), (576, Some(64)), (300, None)]
    {
        assert_eq!(fragment_elements_for_mtu::<Directions>(mtu), elements, "{mtu}");
        assert_eq!(fragment_elements_for_mtu::<PlannedDirections>(mtu), elements, "{mtu}");
    }
}

#[test]
fn an_ethernet_frame_of_1500_carries_352_elements_one_of_9000_2048_and_narrow_ones_64_and_32() {
    for wire_dtype in WireDtype::ALL {
        assert_eq!(chunk_elements_for_mtu(1500, wire_dtype), Some(352));
        assert_eq!(chunk_elements_for_mtu(9000, wire_dtype), Some(2048));
        assert_eq!(chunk_elements_for_mtu(1280, wire_dtype), Some(256));
        assert_eq!(chunk_elements_for_mtu(576, wire_dtype), Some(64));
        assert_eq!(chunk_elements_for_mtu(300, wire_dtype), Some(32));
        assert_eq!(chunk_elements_for_mtu(215, wire_dtype), None);
    }
    // A bfloat16 payload is the four bytes of its exponent longer.
    assert_eq!(chunk_elements_for_mtu(1496, WireDtype::SharedExponent), Some(352));
    assert_eq!(chunk_elements_for_mtu(1499, WireDtype::Bfloat16), Some(256));
    assert_eq!(chunk_elements_for_mtu(1500, WireDtype::Bfloat16), Some(352));
}
