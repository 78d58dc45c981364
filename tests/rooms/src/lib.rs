//! Tests of the house itself: which room may import which, and what may not be in any.
