//! Links the protocol with a panic handler and an allocator of its own. If anything below linked the standard library,
//! the panic handler would be defined twice and this would not compile.
#![no_std]

#[cfg(feature = "with_std")]
extern crate std;

use core::alloc::{GlobalAlloc, Layout};

use fanin_protocol::switchml::Switch;
use fanin_protocol::{Endpoint, Instant};

struct NoMemory;

// SAFETY: it never returns memory, and a null pointer is how an allocator says so.
unsafe impl GlobalAlloc for NoMemory {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        core::ptr::null_mut()
    }
    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[global_allocator]
static MEMORY: NoMemory = NoMemory;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

/// Keeps the machines in the library.
#[unsafe(no_mangle)]
pub extern "C" fn fanin_no_os() -> bool {
    let mut switch: Switch<u8> = Switch::new(fanin_wire::ShardId(0));
    switch.handle_packet(Instant(0), 0, &[]);
    switch.poll_transmit(Instant(0), &mut [0; 64]).is_none()
}
