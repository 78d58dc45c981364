//! What the ranks of a job say to each other before they join it.
//!
//! They do so in rounds, each of which is over when every rank has said something. A rank's word is
//! here as long as its call: nothing is left of one that hangs up or dies. The first round's answer
//! has a number that nobody else knows, and is part of the name of all that follow, so that two
//! attempts at a job share no later round. Where a rank says its first word again, its process was
//! started anew, and the attempt that it took part in is over for all. The last round lasts as long
//! as the ranks join, so that those who join hear of it too.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fanin_limits::host_of;
use fanin_protocol::control::{Ranks, Refusal, is_job_name};
use fanin_wire::{RANKS_MAX, Rank};
use prost::bytes::Bytes;
use tokio::sync::oneshot;
use tonic::Status;

use super::lock;
use crate::proto::{MeetRequest, meet_reply::Met};

/// Bytes of a round's name.
const ROUND_BYTES_MAX: usize = 32;
/// Bytes that a rank may say in a round: where several switches are and what their links carry.
const TEXT_BYTES_MAX: usize = 16 << 10;
/// Bytes that all ranks may say in a round, each of which is told all of it: 512 a rank where there
/// are as many as may be.
const TEXTS_BYTES_MAX: usize = 512 * RANKS_MAX as usize;
/// As many bytes of texts end a piece of an answer.
const PIECE_BYTES: usize = 16 << 10;
/// What a text takes in it beside its bytes.
const TEXT_HEADER_BYTES: usize = 4;
/// What a word takes beside its text.
const WORD_BYTES: usize = 512;
/// Bytes of all words that wait.
const BYTES_MAX: usize = 32 << 20;
/// And of those that came from one address: a quarter, so that others have room.
const BYTES_OF_ONE_MAX: usize = 8 << 20;
/// Later rounds of jobs of one name that are under way: those of an attempt follow each other, and
/// few attempts are left alone.
const LATER_ROUNDS_MAX: usize = 16;

/// Rounds under way.
#[derive(Debug, Default)]
pub(super) struct Meetings(Arc<Mutex<Rounds>>);

#[derive(Debug, Default)]
struct Rounds {
    rounds: BTreeMap<Name, Round>,
    /// Bytes of the words that wait, by where they came from.
    bytes: HashMap<IpAddr, usize>,
    next_ticket: u64,
}

/// Which round of which attempt at which job.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Name {
    job: String,
    /// 0 in the first round.
    attempt: u64,
    /// Empty in the first round, of which there is one.
    round: String,
    /// Whether the ranks join meanwhile: it is not over when all are there.
    joins: bool,
}

#[derive(Debug)]
struct Round {
    world_size: u32,
    words: BTreeMap<u32, Word>,
    /// More was said than all may be told.
    too_long: bool,
}

#[derive(Debug)]
struct Word {
    text: Bytes,
    from: IpAddr,
    /// Of whose call it is.
    ticket: u64,
    answer: oneshot::Sender<Answer>,
}

type Answer = Result<Arc<Met>, NotHeard>;

/// A rank that has said its word, until it is dropped.
#[derive(Debug)]
pub(super) struct Present {
    name: Name,
    rank: u32,
    ticket: u64,
    answer: oneshot::Receiver<Answer>,
    rounds: Arc<Mutex<Rounds>>,
}

/// What all ranks said, as one of them is told it: all share it, and a piece is made when the one
/// before has been taken.
#[derive(Debug)]
pub(super) struct Pieces {
    met: Arc<Met>,
    /// Whose text is the next.
    next: usize,
}

/// Why a word is not taken, or was in vain.
#[derive(Clone, Debug)]
pub(super) enum NotHeard {
    Refused(Refusal),
    /// There is no room for it, or it is no word.
    Failed(Status),
}

impl From<Refusal> for NotHeard {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Pieces {
    pub const fn of(met: Arc<Met>) -> Self {
        Self { met, next: 0 }
    }
}

impl Iterator for Pieces {
    type Item = Met;

    fn next(&mut self) -> Option<Met> {
        let mut bytes = 0;
        let texts = self.met.texts[self.next..].iter().take_while(|text| {
            let is_full = bytes >= PIECE_BYTES;
            bytes += text.len() + TEXT_HEADER_BYTES;
            !is_full
        });
        let texts: Vec<_> = texts.cloned().collect();
        self.next += texts.len();
        (!texts.is_empty()).then_some(Met { texts, attempt: self.met.attempt })
    }
}

impl Meetings {
    /// Takes a rank's word. Who said the last one of a round ends it, and who says a first word the
    /// later rounds that wait for one of his.
    pub fn enter(&self, from: IpAddr, request: MeetRequest) -> Result<Present, NotHeard> {
        let MeetRequest { job, rank, world_size, round, attempt, text, joins, .. } = request;
        check(&job, rank, world_size)?;
        if round.len() > ROUND_BYTES_MAX {
            let why = format!("a round's name has at most {ROUND_BYTES_MAX} bytes");
            return Err(NotHeard::Failed(Status::out_of_range(why)));
        }
        let from = host_of(from);
        let round = if attempt == 0 { String::new() } else { round };
        let name = Name { job, attempt, round, joins: joins && attempt != 0 };
        let mut rounds = lock(&self.0);
        let mut too_long = text.len() > TEXT_BYTES_MAX;
        if let Some(round) = rounds.rounds.get(&name) {
            if round.world_size != world_size {
                let job_has = round.world_size;
                return Err(Refusal::WorldSizeMismatch { rank, asked: world_size, job_has }.into());
            }
            if round.words.contains_key(&rank) {
                return Err(Refusal::DuplicateRank { rank }.into());
            }
            too_long |= round.too_long || round.bytes() + text.len() > TEXTS_BYTES_MAX;
        } else if attempt != 0 && rounds.later(&name.job).count() == LATER_ROUNDS_MAX {
            return Err(crowded());
        }
        // Nobody will be told of it. That it is too much all are told when all are there, so that
        // none waits for those who were told before. Not a part of what the call came in, of which
        // more than the text would be kept.
        let text = if too_long { Bytes::new() } else { Bytes::copy_from_slice(&text) };
        let word = text.len() + WORD_BYTES;
        let of_one = rounds.bytes.get(&from).copied().unwrap_or_default();
        if of_one + word > BYTES_OF_ONE_MAX || rounds.bytes.values().sum::<usize>() + word > BYTES_MAX {
            if !name.joins {
                // The others would wait for this rank.
                rounds.end(&name, &Err(crowded()));
            }
            return Err(crowded());
        }
        let (answer, answered) = oneshot::channel();
        let ticket = rounds.next_ticket;
        rounds.next_ticket += 1;
        *rounds.bytes.entry(from).or_default() += word;
        let round = rounds.rounds.entry(name.clone());
        let round = round.or_insert_with(|| Round { world_size, words: BTreeMap::new(), too_long });
        round.too_long = too_long;
        round.words.insert(rank, Word { text, from, ticket, answer });
        if !name.joins && round.words.len() == world_size as usize {
            let answer = round.answer(attempt);
            rounds.end(&name, &answer);
        }
        if attempt == 0 {
            rounds.begins_anew(&name.job, rank, world_size);
        } else {
            rounds.end_if_anew(&name);
        }
        drop(rounds);
        Ok(Present { name, rank, ticket, answer: answered, rounds: Arc::clone(&self.0) })
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        lock(&self.0).rounds.is_empty()
    }

    /// A rank begins anew: all are told who met it and have still to hear of it, or still join.
    pub fn begins_anew(&self, job: &str, rank: u32, world_size: u32) {
        lock(&self.0).begins_anew(job, rank, world_size);
    }

    /// Jobs of which ranks meet: their world sizes, and who is there. Those that join are for the
    /// services to tell.
    pub fn jobs(&self) -> Vec<(String, u32, Ranks)> {
        let rounds = lock(&self.0);
        let present = |round: &Round| ranks(round.words.keys().copied());
        rounds
            .rounds
            .iter()
            .filter(|(name, _)| !name.joins)
            .map(|(name, round)| (name.job.clone(), round.world_size, present(round)))
            .collect()
    }
}

impl Present {
    /// What all ranks said, once they have. When one of them loses patience, nobody waits any
    /// longer.
    pub async fn others(&mut self, patience: Duration) -> Answer {
        if let Ok(answered) = tokio::time::timeout(patience, &mut self.answer).await {
            return answered.unwrap_or(Err(Refusal::SwitchStopping.into()));
        }
        let mut rounds = lock(&self.rounds);
        let Some(round) = rounds.rounds.get(&self.name).filter(|round| round.has(self.rank, self.ticket))
        else {
            // Just now.
            return self.answer.try_recv().unwrap_or(Err(Refusal::SwitchStopping.into()));
        };
        let absent = (0..round.world_size).filter(|rank| !round.words.contains_key(rank));
        let answer = Err(Refusal::JoinTimeout { missing: ranks(absent) }.into());
        rounds.end(&self.name, &answer);
        answer
    }
}

impl Drop for Present {
    fn drop(&mut self) {
        let mut rounds = lock(&self.rounds);
        let Some(round) = rounds.rounds.get_mut(&self.name) else { return };
        if !round.has(self.rank, self.ticket) {
            return;
        }
        let word = round.words.remove(&self.rank);
        if round.words.is_empty() {
            rounds.rounds.remove(&self.name);
        }
        word.iter().for_each(|word| rounds.forget(word));
        // Its process may have died, and the next one have begun before this was seen.
        rounds.end_if_anew(&self.name);
    }
}

impl Rounds {
    /// The rounds of a job but the first.
    fn later(&self, job: &str) -> impl Iterator<Item = (&Name, &Round)> {
        let second = Name { job: job.into(), attempt: 1, round: String::new(), joins: false };
        self.rounds.range(second..).take_while(move |(name, _)| name.job == job)
    }

    /// Ends the later rounds of a job that lack a rank which begins anew.
    fn begins_anew(&mut self, job: &str, rank: u32, world_size: u32) {
        let lacks = |round: &Round| round.world_size == world_size && !round.words.contains_key(&rank);
        let ended = self.later(job).filter(|(_, round)| lacks(round));
        for name in ended.map(|(name, _)| name.clone()).collect::<Vec<_>>() {
            self.end(&name, &Err(Refusal::BeganAnew { rank }.into()));
        }
    }

    /// Ends a later round of a job if it lacks a rank that has begun anew: some were between two
    /// rounds then.
    fn end_if_anew(&mut self, name: &Name) {
        let first = Name { job: name.job.clone(), attempt: 0, round: String::new(), joins: false };
        if *name == first {
            return;
        }
        let (Some(round), Some(first)) = (self.rounds.get(name), self.rounds.get(&first)) else { return };
        let anew = first.words.keys().copied().find(|rank| !round.words.contains_key(rank));
        if let Some(rank) = anew.filter(|_| first.world_size == round.world_size) {
            self.end(name, &Err(Refusal::BeganAnew { rank }.into()));
        }
    }

    /// Tells all who wait in a round.
    fn end(&mut self, name: &Name, answer: &Answer) {
        let Some(round) = self.rounds.remove(name) else { return };
        for word in round.words.into_values() {
            self.forget(&word);
            // It may have hung up.
            let _ = word.answer.send(answer.clone());
        }
    }

    fn forget(&mut self, word: &Word) {
        let Some(bytes) = self.bytes.get_mut(&word.from) else { return };
        *bytes -= word.text.len() + WORD_BYTES;
        if *bytes == 0 {
            self.bytes.remove(&word.from);
        }
    }
}

impl Round {
    /// What all hear when all have said something.
    fn answer(&self, attempt: u64) -> Answer {
        if self.too_long {
            let (of_rank, of_job) = (TEXT_BYTES_MAX as u32, TEXTS_BYTES_MAX as u32);
            return Err(Refusal::WordsTooLong { of_rank, of_job }.into());
        }
        let attempt = if attempt == 0 { rand::random_range(1..=u64::MAX) } else { attempt };
        let texts = self.words.values().map(|word| word.text.clone()).collect();
        Ok(Arc::new(Met { texts, attempt }))
    }

    fn bytes(&self) -> usize {
        self.words.values().map(|word| word.text.len()).sum()
    }

    fn has(&self, rank: u32, ticket: u64) -> bool {
        self.words.get(&rank).is_some_and(|word| word.ticket == ticket)
    }
}

fn crowded() -> NotHeard {
    NotHeard::Failed(Status::resource_exhausted("too many ranks meet here already; start fewer at a time"))
}

/// As a request to join is looked at.
fn check(job: &str, rank: u32, world_size: u32) -> Result<(), Refusal> {
    if !is_job_name(job) {
        return Err(Refusal::JobName { bytes: job.len() });
    }
    if world_size > RANKS_MAX {
        return Err(Refusal::TooManyWorkers { asked: world_size, max: RANKS_MAX });
    }
    if rank >= world_size {
        return Err(Refusal::RankOutOfRange { rank, world_size });
    }
    Ok(())
}

fn ranks(ranks: impl Iterator<Item = u32>) -> Ranks {
    ranks.map(|rank| Rank(rank as u16)).collect()
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    const HERE: [u8; 4] = [10, 0, 0, 1];

    fn said(attempt: u64, rank: u32, text: &str) -> MeetRequest {
        MeetRequest {
            job: "job".into(),
            rank,
            world_size: 3,
            round: "place".into(),
            attempt,
            text: text.to_owned().into(),
            ..MeetRequest::default()
        }
    }

    fn enter(meetings: &Meetings, attempt: u64, rank: u32, text: &str) -> Present {
        meetings.enter(HERE.into(), said(attempt, rank, text)).expect("heard")
    }

    async fn hears(mut present: Present) -> (Vec<Bytes>, u64) {
        let met = present.others(Duration::from_secs(60)).await.expect("all are there");
        (met.texts.clone(), met.attempt)
    }

    #[tokio::test]
    async fn all_hear_what_all_said_once_the_last_has_come() {
        let meetings = Meetings::default();
        let two = enter(&meetings, 0, 2, "c");
        let zero = enter(&meetings, 0, 0, "a");
        assert_eq!(meetings.jobs(), [("job".into(), 3, ranks([0, 2].into_iter()))]);
        let one = enter(&meetings, 0, 1, "b");
        assert!(meetings.is_empty());
        let (texts, attempt) = hears(one).await;
        assert_eq!(texts, ["a", "b", "c"]);
        assert_ne!(attempt, 0);
        assert_eq!(hears(zero).await, (texts.clone(), attempt));
        assert_eq!(hears(two).await, (texts, attempt));
        assert!(lock(&meetings.0).bytes.is_empty(), "nothing is kept");
    }

    #[tokio::test]
    async fn what_a_rank_said_goes_with_its_call_and_another_attempt_has_rounds_of_its_own() {
        let meetings = Meetings::default();
        let dead = enter(&meetings, 0, 0, "dead");
        let again = meetings.enter(HERE.into(), said(0, 0, "twice"));
        assert!(matches!(again, Err(NotHeard::Refused(Refusal::DuplicateRank { rank: 0 }))), "{again:?}");
        drop(dead);
        assert!(meetings.is_empty() && lock(&meetings.0).bytes.is_empty());
        let old = enter(&meetings, 7, 0, "old");
        let first = [0, 1, 2].map(|rank| enter(&meetings, 8, rank, "new"));
        for present in first {
            assert_eq!(hears(present).await, (vec!["new".into(); 3], 8));
        }
        assert_eq!(meetings.jobs().len(), 1, "the old one still waits");
        drop(old);
    }

    #[tokio::test]
    async fn who_is_missing_is_told_to_all_when_the_first_loses_patience() {
        let meetings = Meetings::default();
        let (mut zero, mut two) = (enter(&meetings, 0, 0, ""), enter(&meetings, 0, 2, ""));
        let short = zero.others(Duration::from_millis(10)).await;
        let long = two.others(Duration::from_secs(1000)).await;
        for answer in [short, long] {
            let Err(NotHeard::Refused(Refusal::JoinTimeout { missing })) = answer else {
                panic!("{answer:?}")
            };
            assert_eq!(missing, ranks([1].into_iter()));
        }
        assert!(meetings.is_empty());
    }

    #[test]
    fn strangers_leave_room_for_others() {
        let meetings = Meetings::default();
        let long = "x".repeat(TEXT_BYTES_MAX);
        let named = |job: usize, from: [u8; 4]| {
            let request = MeetRequest { job: job.to_string(), ..said(0, 0, &long) };
            meetings.enter(from.into(), request)
        };
        let mut here: Vec<_> = (0..).map(|job| named(job, HERE)).take_while(Result::is_ok).collect();
        assert!(here.len() * TEXT_BYTES_MAX <= BYTES_OF_ONE_MAX);
        assert!(here.len() * TEXT_BYTES_MAX >= BYTES_OF_ONE_MAX * 9 / 10);
        assert!(named(0, [10, 0, 0, 2]).is_err(), "as rank 0 is there");
        assert!(named(1 << 20, [10, 0, 0, 2]).is_ok(), "there is room for others");
        here.pop();
        assert!(named(1 << 20, HERE).is_ok(), "and for one more when one has gone");
        let wide = MeetRequest { world_size: RANKS_MAX + 1, ..said(0, 0, "") };
        assert!(matches!(meetings.enter(HERE.into(), wide), Err(NotHeard::Refused(_))));
        let later = |attempt| meetings.enter([10, 0, 0, 3].into(), said(attempt, 0, ""));
        let rounds: Vec<_> = (1..).map(later).take_while(Result::is_ok).collect();
        assert_eq!(rounds.len(), LATER_ROUNDS_MAX);
    }

    #[test]
    fn nothing_is_kept_of_a_word_but_its_text() {
        let meetings = Meetings::default();
        let received = Bytes::from(vec![b'x'; 8 << 10]);
        let text = received.slice(..1);
        let present = meetings.enter(HERE.into(), MeetRequest { text, ..said(0, 0, "") }).expect("heard");
        assert!(received.is_unique());
        drop(present);
    }

    #[tokio::test]
    async fn all_hear_that_there_is_no_room_for_one_of_them() {
        let meetings = Meetings::default();
        let mut zero = enter(&meetings, 0, 0, "");
        let full = |job: usize| {
            let text = "x".repeat(TEXT_BYTES_MAX).into();
            meetings.enter(HERE.into(), MeetRequest { job: job.to_string(), text, ..said(0, 0, "") })
        };
        let others: Vec<_> = (0..).map(full).take_while(Result::is_ok).collect();
        let long = "x".repeat(TEXT_BYTES_MAX);
        assert!(matches!(meetings.enter(HERE.into(), said(0, 1, &long)), Err(NotHeard::Failed(_))));
        let answer = zero.others(Duration::from_secs(60)).await;
        assert!(matches!(answer, Err(NotHeard::Failed(_))), "{answer:?}");
        drop(others);
    }

    async fn hears_of_one_that_began_anew(mut present: Present) -> u32 {
        let answer = present.others(Duration::from_secs(60)).await;
        let Err(NotHeard::Refused(Refusal::BeganAnew { rank })) = answer else { panic!("{answer:?}") };
        rank
    }

    #[tokio::test]
    async fn an_attempt_is_over_for_all_once_one_of_its_ranks_begins_anew() {
        let meetings = Meetings::default();
        let zero = enter(&meetings, 7, 0, "");
        let other =
            meetings.enter(HERE.into(), MeetRequest { world_size: 4, ..said(8, 0, "") }).expect("heard");
        let anew = enter(&meetings, 0, 1, "");
        assert_eq!(hears_of_one_that_began_anew(zero).await, 1);
        // It was between two rounds when rank 1 came.
        assert_eq!(hears_of_one_that_began_anew(enter(&meetings, 7, 2, "")).await, 1);
        drop(other); // Of another size: it was left alone.
        let (zero, two) = (enter(&meetings, 0, 0, ""), enter(&meetings, 0, 2, ""));
        let attempt = hears(anew).await.1;
        assert_eq!((hears(zero).await.1, hears(two).await.1), (attempt, attempt));
        assert!(meetings.is_empty() && lock(&meetings.0).bytes.is_empty());
    }

    #[tokio::test]
    async fn those_who_join_are_told_of_one_that_begins_anew_and_of_nothing_else() {
        let meetings = Meetings::default();
        let joins = |rank| {
            let request = MeetRequest { joins: true, ..said(7, rank, "") };
            meetings.enter(HERE.into(), request).expect("heard")
        };
        let [mut zero, dead, two] = [0, 1, 2].map(joins);
        assert_eq!(meetings.jobs(), [], "the services tell of it");
        // Its next process is there before the switch sees that the one before is gone.
        let anew = enter(&meetings, 0, 1, "");
        assert!(zero.answer.try_recv().is_err(), "all are there, and nothing is over");
        drop(dead);
        assert_eq!(hears_of_one_that_began_anew(zero).await, 1);
        assert_eq!(hears_of_one_that_began_anew(two).await, 1);
        drop(anew);
        // Who has joined hangs up.
        let mut still = [0, 1, 2].map(joins).into_iter().last().expect("three");
        assert!(still.answer.try_recv().is_err());
        drop(still);
        assert!(meetings.is_empty() && lock(&meetings.0).bytes.is_empty());
    }

    #[tokio::test]
    async fn a_rank_that_spoke_in_a_round_does_not_end_it() {
        let meetings = Meetings::default();
        let round = [0, 1].map(|rank| enter(&meetings, 7, rank, ""));
        let _twin = enter(&meetings, 0, 1, "");
        let last = enter(&meetings, 7, 2, "");
        for present in round.into_iter().chain([last]) {
            assert_eq!(hears(present).await.1, 7);
        }
    }

    #[tokio::test]
    async fn as_many_ranks_as_may_be_have_room_and_all_hear_when_they_say_too_much() {
        let meetings = Meetings::default();
        let round = |first: String| {
            let text = |rank| if rank == 0 { first.clone() } else { "x".repeat(512) };
            let said = |rank| MeetRequest { world_size: RANKS_MAX, ..said(7, rank, &text(rank)) };
            (0..RANKS_MAX)
                .map(|rank| meetings.enter(HERE.into(), said(rank)).expect("heard"))
                .collect::<Vec<_>>()
        };
        let patience = Duration::from_secs(60);
        for mut present in round("x".repeat(512)) {
            let met = present.others(patience).await.expect("all are there");
            // Nobody is told 2 MiB at once, nor has a copy of them.
            let mut heard = met.texts.iter();
            for piece in Pieces::of(Arc::clone(&met)) {
                assert!(piece.encoded_len() <= PIECE_BYTES + TEXT_BYTES_MAX, "{}", piece.encoded_len());
                assert!(
                    piece
                        .texts
                        .iter()
                        .all(|text| Some(text.as_ptr()) == heard.next().map(|text| text.as_ptr()))
                );
            }
            assert!(heard.next().is_none());
        }
        for first in [513, TEXT_BYTES_MAX + 1] {
            for mut present in round("x".repeat(first)) {
                let answer = present.others(patience).await;
                let told = matches!(answer, Err(NotHeard::Refused(Refusal::WordsTooLong { .. })));
                assert!(told, "{answer:?}");
            }
        }
        assert!(meetings.is_empty() && lock(&meetings.0).bytes.is_empty());
    }
}
