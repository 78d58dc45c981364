//! The fate of the file, and who may have it.

mod common;

use common::{PATIENCE, memories, name};
use fanin_local::{Group, MemoryError, SharedMemory, machine_id, probe};
use std::path::Path;
use std::time::Duration;

fn group(ranks: usize) -> Group {
    Group { ranks: (0..ranks as u32).collect(), columns: ranks, networked: false }
}

fn is_there(name: &str) -> bool {
    Path::new("/dev/shm").join(name).exists()
}

#[test]
fn its_name_is_gone_once_everybody_has_it() {
    let (name, group) = (name(), group(3));
    let first = SharedMemory::create(&name, group.clone()).expect("room");
    let second = SharedMemory::open(&name, group.clone(), 1, PATIENCE).expect("the memory");
    assert!(is_there(&name));
    let missing = first.gather(Duration::ZERO).expect_err("the third is missing").to_string();
    assert!(missing.starts_with("ranks [2] of this machine did not open"), "{missing}");
    let third = SharedMemory::open(&name, group, 2, PATIENCE).expect("the memory");
    assert!(!is_there(&name));
    for memory in [first, second, third] {
        memory.gather(Duration::ZERO).expect("all are there");
    }
}

#[test]
fn its_name_is_gone_with_a_first_rank_that_gave_up() {
    let name = name();
    drop(SharedMemory::create(&name, group(2)).expect("room"));
    assert!(!is_there(&name));
    let nothing = SharedMemory::open(&name, group(2), 1, Duration::ZERO).expect_err("it is gone");
    assert!(matches!(nothing, MemoryError::Unreachable { .. }), "{nothing}");
}

#[test]
fn another_groups_memory_is_refused() {
    let name = name();
    let first = SharedMemory::create(&name, group(3)).expect("room");
    let others = [
        group(2),
        Group { ranks: vec![0, 1, 3], ..group(3) },
        Group { columns: 2, networked: true, ..group(3) },
        Group { networked: true, ..group(3) },
    ];
    for other in others {
        let refused = SharedMemory::open(&name, other, 1, PATIENCE).expect_err("another group");
        assert!(matches!(refused, MemoryError::Foreign { .. }), "{refused}");
    }
    let again = SharedMemory::create(&name, group(3)).expect_err("the name is taken");
    assert!(matches!(again, MemoryError::Unusable { .. }), "{again}");
    // None of them has taken a seat, or the name away.
    SharedMemory::open(&name, group(3), 1, PATIENCE).expect("the group's own rank");
    first.gather(Duration::ZERO).expect_err("one left, and one is missing");
}

#[test]
fn what_the_first_rank_tells_is_heard_when_all_columns_have_joined_and_that_one_left_too() {
    let columns = |columns| Group { columns, networked: true, ..group(3) };
    for answer in [0, 1, 3] {
        let memories = memories(&columns(2));
        for joins in [0, 1] {
            assert!(
                memories.iter().all(|memory| memory.told(Duration::ZERO).expect("all are here").is_none())
            );
            memories[joins].tell(if joins == 0 { answer } else { 7 });
        }
        let told = memories.iter().map(|memory| memory.told(PATIENCE).expect("all are here"));
        assert!(told.eq([Some(answer); 3]));
    }
    for leaves in [0, 1] {
        let mut memories = memories(&columns(2));
        memories[1 - leaves].tell(1);
        drop(memories.remove(leaves));
        for memory in &memories {
            let error = memory.told(PATIENCE).expect_err("it has left").to_string();
            assert!(error.starts_with(&format!("rank {leaves} of this machine has ended")), "{error}");
        }
    }
}

#[test]
fn too_little_room_is_an_error_when_it_is_made() {
    probe(group(8).bytes().expect("a group")).expect("room for eight ranks");
    let error = probe(1 << 50).expect_err("no machine has so much").to_string();
    assert!(error.starts_with("1125899906842624 bytes of shared memory in /dev/shm: "), "{error}");
}

#[test]
fn groups_have_two_to_sixty_four_ranks() {
    for ranks in [0, 1, 65] {
        assert!(group(ranks).bytes().is_err());
    }
    let alone = Group { networked: true, ..group(1) };
    memories(&alone)[0].gather(Duration::ZERO).expect("nobody else is to come");
    assert!(Group { columns: 0, ..group(2) }.bytes().is_err());
    assert!(Group { columns: 3, ..group(2) }.bytes().is_err());
    assert_eq!(memories(&group(64)).len(), 64);
}

#[test]
fn a_machine_is_named_alike_twice_and_by_what_is_shared() {
    let name = machine_id();
    assert_eq!(name, machine_id());
    assert!(["/net=", "/shm=", "/user="].iter().all(|part| name.contains(part)), "{name}");
}
