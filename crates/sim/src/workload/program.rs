//! The program of one worker: when it submits which tensor. It knows no network; the actors around
//! it ask and tell.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use oorandom::Rand64;

use super::schedule::{Schedule, Training};

/// The worker's next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// This tensor is ready to be reduced.
    Submit {
        /// Its number in the job, from 0.
        tensor: u64,
        elements: usize,
    },
    /// Call [`Program::timer`] after this long.
    Wait(Duration),
    /// An iteration is over.
    Iterated,
    /// It has nothing more to do.
    Finished,
}

/// One worker's.
pub(crate) struct Program {
    schedule: Rc<Schedule>,
    dice: Rand64,
    /// Gradients that back-propagation has made.
    made: u64,
    /// The next tensor that it submits.
    next: u64,
    outstanding: BTreeSet<u64>,
    /// Training: iterations completed ..
    iteration: u64,
    /// .. and those whose forward pass, or the pause before it, has begun.
    begun: u64,
    /// Training: how this phase's times differ from the model's.
    pace: f64,
    state: State,
    /// The first tensor that is not submitted any more, if the job was stopped.
    end: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    Paused,
    Forward,
    /// The layers of a gradient, as passes overlap.
    ForwardOf(usize),
    /// The same, and its parameters are not there.
    WaitsFor(usize),
    Backward,
    /// All gradients are there, and the exchange of the step before is not over.
    Settles,
    Finished,
}

impl Program {
    pub(crate) fn new(schedule: Rc<Schedule>, seed: u64) -> Self {
        Self {
            schedule,
            dice: Rand64::new(seed.into()),
            made: 0,
            next: 0,
            outstanding: BTreeSet::new(),
            iteration: 0,
            begun: 0,
            pace: 1.0,
            state: State::Idle,
            end: None,
        }
    }

    /// Begins.
    pub(crate) fn start(&mut self, steps: &mut Vec<Step>) {
        match &*self.schedule.clone() {
            Schedule::AllReduce { in_flight, .. } => {
                for _ in 0..*in_flight {
                    self.submit_next(steps);
                }
            }
            Schedule::Training(training) => self.begin_iteration(training, steps),
        }
    }

    /// Whether it waits without computing, between two iterations.
    pub(crate) const fn is_paused(&self) -> bool {
        matches!(self.state, State::Paused)
    }

    /// The next tensor that it submits.
    pub(crate) const fn next_tensor(&self) -> u64 {
        self.next
    }

    /// The first tensor that it does not submit if nobody makes it begin more: those of an
    /// iteration are one.
    pub(crate) fn committed(&self) -> u64 {
        match (&*self.schedule, self.state) {
            (Schedule::AllReduce { .. }, _) | (_, State::Idle | State::Finished) => self.next,
            (Schedule::Training(training), _) => self.begun * training.gradients.len() as u64,
        }
    }

    /// Submits nothing from tensor `end` on. All workers of a job have the same: what one has
    /// submitted needs all of them.
    pub(crate) fn stop(&mut self, end: u64, steps: &mut Vec<Step>) {
        self.end = Some(end);
        if self.is_over() && matches!(*self.schedule, Schedule::AllReduce { .. }) {
            self.finish_if_done(steps);
        }
    }

    fn is_over(&self) -> bool {
        self.end.is_some_and(|end| self.next >= end)
    }

    /// A time that it waited for is over.
    pub(crate) fn timer(&mut self, steps: &mut Vec<Step>) {
        let schedule = self.schedule.clone();
        let Schedule::Training(training) = &*schedule else { return };
        match self.state {
            State::Paused => self.forward(training, steps),
            State::Forward | State::ForwardOf(0) => {
                self.state = State::Backward;
                self.pace = self.draw(training.jitter);
                self.wait_for_gradient(training, 0, steps);
            }
            State::ForwardOf(index) => self.forward_of(training, index - 1, steps),
            State::Backward => {
                self.made += 1;
                self.go_on_backward(training, steps);
            }
            State::Idle | State::WaitsFor(_) | State::Settles | State::Finished => {}
        }
    }

    /// A tensor is the sum. False if it was not under way.
    pub(crate) fn completed(&mut self, tensor: u64, steps: &mut Vec<Step>) -> bool {
        if !self.outstanding.remove(&tensor) {
            return false;
        }
        match &*self.schedule.clone() {
            Schedule::AllReduce { .. } => self.submit_next(steps),
            Schedule::Training(training) => {
                // The barrier: parameters are updated when every gradient is there. If passes
                // overlap, each layer has a barrier of its own, so that no gradient of the next
                // iteration is there before all of this one's. If workers step themselves, their
                // next step waits for all answers.
                if self.outstanding.is_empty()
                    && self.next == (self.iteration + 1) * training.gradients.len() as u64
                {
                    self.iteration += 1;
                    steps.push(Step::Iterated);
                    if self.begun == self.iteration {
                        self.begin_iteration(training, steps);
                    }
                }
                match self.state {
                    State::WaitsFor(index) => self.forward_of(training, index, steps),
                    State::Settles => self.go_on_backward(training, steps),
                    _ => {}
                }
            }
        }
        true
    }

    /// Another process takes the worker's place: timers are lost, and of what was under way, what
    /// is `from` this tensor on is submitted again. Everything before is done.
    pub(crate) fn go_on_from(&mut self, from: u64, steps: &mut Vec<Step>) {
        self.outstanding.clear();
        self.next = from;
        match &*self.schedule.clone() {
            Schedule::AllReduce { in_flight, .. } => {
                self.state = State::Idle;
                for _ in 0..*in_flight {
                    self.submit_next(steps);
                }
            }
            Schedule::Training(training) => {
                let gradients = training.gradients.len() as u64;
                let iteration = from / gradients;
                self.made = training.made_for(from);
                if iteration > self.iteration {
                    (self.iteration, self.state) = (iteration, State::Idle);
                    steps.push(Step::Iterated);
                }
                match self.state {
                    State::Finished => {}
                    State::Idle | State::Paused | State::Forward => self.begin_iteration(training, steps),
                    State::Backward | State::Settles => self.go_on_backward(training, steps),
                    // It takes back gradients of the iteration before, which are there.
                    State::ForwardOf(_) | State::WaitsFor(_) if from < (self.begun - 1) * gradients => {
                        self.begun -= 1;
                        self.go_on_backward(training, steps);
                    }
                    State::ForwardOf(index) | State::WaitsFor(index) => {
                        self.forward_of(training, index, steps);
                    }
                }
            }
        }
    }

    /// The node was away and is back: timers are lost, and nothing else.
    pub(crate) fn restarted(&mut self, steps: &mut Vec<Step>) {
        let Schedule::Training(training) = &*self.schedule.clone() else { return };
        match self.state {
            State::Paused | State::Forward => self.forward(training, steps),
            State::ForwardOf(index) => self.forward_of(training, index, steps),
            State::Backward if self.made < self.begun * training.gradients.len() as u64 => {
                let index = (self.made % training.gradients.len() as u64) as usize;
                self.wait_for_gradient(training, index, steps);
            }
            State::Backward | State::Settles | State::Idle | State::WaitsFor(_) | State::Finished => {}
        }
    }

    /// Whether no iteration follows those that have begun.
    fn is_last(&self, training: &Training) -> bool {
        self.is_over() || training.iterations.is_some_and(|most| self.begun >= most)
    }

    fn begin_iteration(&mut self, training: &Training, steps: &mut Vec<Step>) {
        self.begun = self.iteration;
        if self.is_last(training) {
            self.state = State::Finished;
            steps.push(Step::Finished);
            return;
        }
        self.begun += 1;
        match training.pause {
            Some((every, length)) if self.iteration > 0 && self.iteration.is_multiple_of(every) => {
                self.state = State::Paused;
                steps.push(Step::Wait(length));
            }
            _ => self.forward(training, steps),
        }
    }

    fn forward(&mut self, training: &Training, steps: &mut Vec<Step>) {
        let pace = self.draw(training.jitter);
        if training.overlap && !training.after_step {
            self.pace = pace;
            return self.forward_of(training, training.gradients.len() - 1, steps);
        }
        self.state = State::Forward;
        steps.push(Step::Wait(training.forward.mul_f64(pace)));
    }

    /// The pass of a gradient's layers, or first their parameters.
    fn forward_of(&mut self, training: &Training, index: usize, steps: &mut Vec<Step>) {
        let before = (self.begun - 1).checked_sub(1).map(|before| before * training.gradients.len() as u64);
        let place = training.places[index] as u64;
        if before.is_some_and(|before| self.outstanding.contains(&(before + place))) {
            self.state = State::WaitsFor(index);
            return;
        }
        self.state = State::ForwardOf(index);
        steps.push(Step::Wait(training.gradients[index].forward.mul_f64(self.pace)));
    }

    /// Submits what is made and whose turn it is, and goes on with the next gradient, or the next
    /// forward pass.
    fn go_on_backward(&mut self, training: &Training, steps: &mut Vec<Step>) {
        let count = training.gradients.len() as u64;
        let begun = (self.begun - 1) * count;
        let may_send = !training.after_step || self.made >= begun + count;
        // A worker steps when the exchange of its step before is over.
        let settles = training.after_step && may_send && self.next <= begun && !self.outstanding.is_empty();
        if settles {
            self.state = State::Settles;
            return;
        }
        self.state = State::Backward;
        while may_send
            && self.next < begun + count
            && begun + (training.gradient(self.next) as u64) < self.made
        {
            self.submit(training.gradients[training.gradient(self.next)].elements, steps);
        }
        if self.made < begun + count {
            self.wait_for_gradient(training, (self.made % count) as usize, steps);
        } else if training.overlap && !self.is_last(training) {
            self.begun += 1;
            self.forward(training, steps);
        }
    }

    fn wait_for_gradient(&self, training: &Training, index: usize, steps: &mut Vec<Step>) {
        steps.push(Step::Wait(training.gradients[index].backward.mul_f64(self.pace)));
    }

    fn draw(&mut self, jitter: f64) -> f64 {
        1.0 + jitter * (2.0 * self.dice.rand_float() - 1.0)
    }

    fn submit_next(&mut self, steps: &mut Vec<Step>) {
        let Schedule::AllReduce { elements, count, .. } = *self.schedule else { return };
        if self.is_over() || count.is_some_and(|count| self.next >= count) {
            self.finish_if_done(steps);
        } else {
            self.submit(elements, steps);
        }
    }

    fn finish_if_done(&mut self, steps: &mut Vec<Step>) {
        if self.outstanding.is_empty() && self.state != State::Finished {
            self.state = State::Finished;
            steps.push(Step::Finished);
        }
    }

    fn submit(&mut self, elements: usize, steps: &mut Vec<Step>) {
        steps.push(Step::Submit { tensor: self.next, elements });
        self.outstanding.insert(self.next);
        self.next += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::super::schedule::tests::{overlapping, sorted_partitions, training};
    use super::*;
    use crate::workload::Workload;

    fn program(workload: &Workload) -> Program {
        Program::new(Rc::new(Schedule::new(workload)), 1)
    }

    #[test]
    fn where_passes_overlap_a_layer_waits_for_its_own_parameters_alone() {
        let mut program = program(&overlapping());
        let Schedule::Training(layers) = &*program.schedule.clone() else { panic!("it trains") };
        let count = layers.gradients.len() as u64;
        let mut steps = Vec::new();
        // Until it waits for parameters: how long, and how often.
        let run = |program: &mut Program, steps: &mut Vec<Step>| {
            let (mut time, mut waits) = (Duration::ZERO, 0);
            while let Some(Step::Wait(length)) =
                steps.iter().find(|step| matches!(step, Step::Wait(_))).copied()
            {
                steps.clear();
                time += length;
                waits += 1;
                program.timer(steps);
            }
            (time, waits)
        };
        program.start(&mut steps);
        // Nothing of the first iteration comes back.
        let (_, waits) = run(&mut program, &mut steps);
        assert_eq!((waits, program.next_tensor(), program.committed()), (2 * count, count, 2 * count));
        assert_eq!(program.state, State::WaitsFor(count as usize - 1), "the front layer's");
        // All but the front layers' are of no use ..
        (0..count - 2).for_each(|tensor| assert!(program.completed(tensor, &mut steps)));
        assert_eq!(run(&mut program, &mut steps).1, 0);
        // .. and with the first of these comes the pass of its layers.
        program.completed(count - 1, &mut steps);
        let (time, waits) = run(&mut program, &mut steps);
        assert_eq!((time, waits), (layers.gradients[count as usize - 1].forward, 1));
        program.completed(count - 2, &mut steps);
        assert!(steps.contains(&Step::Iterated));
        run(&mut program, &mut steps);
        assert_eq!(program.next_tensor(), 2 * count, "no third iteration begins");
        (count..2 * count).for_each(|tensor| assert!(program.completed(tensor, &mut steps)));
        assert_eq!(steps.iter().filter(|step| **step == Step::Finished).count(), 1);
        // Both compute the same.
        let both = [training(100.0, 0.0, 2, None), overlapping()];
        let times = both.map(|workload| play(&mut super::tests::program(&workload)).0);
        assert!(times[0].abs_diff(times[1]) < Duration::from_micros(1), "{times:?}");
    }

    #[test]
    fn a_worker_that_was_away_between_two_iterations_that_overlap_does_the_rest() {
        let mut program = program(&overlapping());
        let Schedule::Training(layers) = &*program.schedule.clone() else { panic!("it trains") };
        let count = layers.gradients.len() as u64;
        for (from, passes) in [(count - 3, 3 + 2 * count), (count, 2 * count)] {
            let mut steps = Vec::new();
            program = Program::new(program.schedule.clone(), 1);
            program.start(&mut steps);
            while steps.iter().any(|step| matches!(step, Step::Wait(_))) {
                steps.clear();
                program.timer(&mut steps);
            }
            steps.clear();
            // A restart brings no parameters; another process has those that the others have.
            program.restarted(&mut steps);
            assert!(steps.is_empty());
            program.go_on_from(from, &mut steps);
            let (mut waits, mut submitted) = (0, Vec::new());
            while !steps.contains(&Step::Finished) {
                for step in std::mem::take(&mut steps) {
                    match step {
                        Step::Submit { tensor, .. } => submitted.push(tensor),
                        Step::Wait(_) => {
                            waits += 1;
                            program.timer(&mut steps);
                        }
                        _ => {}
                    }
                }
                if steps.is_empty() {
                    let tensor =
                        submitted.iter().copied().find(|tensor| program.outstanding.contains(tensor));
                    program.completed(tensor.expect("it waits for something"), &mut steps);
                }
            }
            assert_eq!((waits, submitted), (passes, (from..2 * count).collect()));
        }
    }

    #[test]
    fn where_steps_overlap_with_an_exchange_the_next_step_waits_for_it() {
        let schedule = Rc::new(Schedule::new(&overlapping()).after_step());
        let count = schedule.period();
        let mut steps = Vec::new();
        let compute = |program: &mut Program, steps: &mut Vec<Step>| {
            let mut submitted = Vec::new();
            while !steps.is_empty() {
                for step in std::mem::take(steps) {
                    match step {
                        Step::Submit { tensor, .. } => submitted.push(tensor),
                        Step::Wait(_) => program.timer(steps),
                        _ => {}
                    }
                }
            }
            submitted
        };
        let mut program = Program::new(schedule.clone(), 1);
        program.start(&mut steps);
        // The second batch is computed, too. Its step waits for the answers of the first one's.
        assert_eq!(compute(&mut program, &mut steps), (0..count).collect::<Vec<_>>());
        assert_eq!((program.state, program.made), (State::Settles, 2 * count));
        program.restarted(&mut steps);
        (1..count).for_each(|tensor| assert!(program.completed(tensor, &mut steps)));
        assert!(steps.is_empty());
        program.completed(0, &mut steps);
        assert_eq!(steps[0], Step::Iterated);
        assert_eq!(compute(&mut program, &mut steps), (count..2 * count).collect::<Vec<_>>());
        (count..2 * count).for_each(|tensor| assert!(program.completed(tensor, &mut steps)));
        assert_eq!(steps, [Step::Iterated, Step::Finished]);
        // In the backward pass of the second batch it is back from being away, or it is stopped: then
        // seven more would follow.
        let mut longer = (*schedule).clone();
        if let Schedule::Training(training) = &mut longer {
            training.iterations = Some(9);
        }
        for (stops, schedule) in [(false, schedule), (true, Rc::new(longer))] {
            let mut program = Program::new(schedule, 1);
            steps.clear();
            program.start(&mut steps);
            while program.made < count + 1 {
                steps.clear();
                program.timer(&mut steps);
            }
            steps.clear();
            match stops {
                true => {
                    assert_eq!(program.committed(), 2 * count);
                    program.stop(2 * count, &mut steps);
                    program.timer(&mut steps);
                }
                false => {
                    program.restarted(&mut steps);
                    assert!(matches!(steps[..], [Step::Wait(_)]), "{steps:?}");
                }
            }
            compute(&mut program, &mut steps);
            assert_eq!((program.state, program.made), (State::Settles, 2 * count));
            (0..2 * count).for_each(|tensor| {
                assert!(program.completed(tensor, &mut steps));
                compute(&mut program, &mut steps);
            });
            assert_eq!((program.state, program.iteration), (State::Finished, 2));
        }
    }

    #[test]
    fn tensors_are_sent_in_their_turn_whenever_a_worker_begins() {
        let schedule = Rc::new(Schedule::new(&sorted_partitions()));
        let Schedule::Training(training) = &*schedule else { panic!("it trains") };
        let count = training.gradients.len() as u64;
        // In the backward pass, and in the forward pass that waits for what that has sent, another
        // process takes its place.
        let backward: fn(State) -> bool = |state| state == State::Backward;
        let forward: fn(State) -> bool = |state| matches!(state, State::WaitsFor(_));
        let mut cases = vec![(1, forward), (count - 2, forward), (count, forward)];
        cases.extend([0, 1, count / 3, count - 1, count, count + 2].map(|from| (from, backward)));
        for (from, is_there) in cases {
            let mut program = Program::new(schedule.clone(), 1);
            let (mut steps, mut submitted) = (Vec::new(), Vec::new());
            program.start(&mut steps);
            if from > 0 {
                while !is_there(program.state) {
                    steps.clear();
                    program.timer(&mut steps);
                }
                steps.clear();
                program.go_on_from(from, &mut steps);
                // Its node was away, too: timers are lost, and what it has submitted is not.
                let submits = |step: &Step| matches!(step, Step::Submit { .. });
                steps.retain(|step| submits(step) || *step == Step::Iterated);
                program.restarted(&mut steps);
            }
            while !steps.contains(&Step::Finished) {
                for step in std::mem::take(&mut steps) {
                    match step {
                        Step::Submit { tensor, elements } => {
                            assert_eq!(elements, schedule.elements(tensor));
                            let number = tensor / count * count + training.gradient(tensor) as u64;
                            assert!(number < program.made, "tensor {tensor} is not made");
                            submitted.push(tensor);
                        }
                        Step::Wait(_) => program.timer(&mut steps),
                        _ => {}
                    }
                }
                if steps.is_empty() {
                    let tensor = program.outstanding.first().copied().expect("it waits for something");
                    program.completed(tensor, &mut steps);
                }
            }
            assert_eq!(submitted, (from..2 * count).collect::<Vec<_>>());
        }
    }

    /// Plays a program whose tensors complete at once; returns the virtual time and the elements
    /// submitted.
    fn play(program: &mut Program) -> (Duration, usize, u64) {
        let (mut time, mut elements, mut iterations) = (Duration::ZERO, 0, 0);
        let mut steps = Vec::new();
        program.start(&mut steps);
        loop {
            assert!(!steps.is_empty(), "nothing to wait for and not finished");
            for step in std::mem::take(&mut steps) {
                match step {
                    Step::Submit { tensor, elements: count } => {
                        elements += count;
                        assert!(program.completed(tensor, &mut steps));
                        assert!(!program.completed(tensor, &mut steps), "it was under way once");
                    }
                    Step::Wait(length) => {
                        time += length;
                        program.timer(&mut steps);
                    }
                    Step::Iterated => iterations += 1,
                    Step::Finished => return (time, elements, iterations),
                }
            }
        }
    }

    #[test]
    fn the_micro_benchmark_keeps_as_many_tensors_under_way_as_asked() {
        let mut program = program(&Workload::AllReduce { elements: 10, in_flight: 3, count: Some(5) });
        let mut steps = Vec::new();
        program.start(&mut steps);
        assert_eq!(steps.len(), 3);
        steps.clear();
        assert!(program.completed(1, &mut steps));
        assert_eq!(steps, [Step::Submit { tensor: 3, elements: 10 }]);
        for tensor in [0, 2, 3] {
            program.completed(tensor, &mut steps);
        }
        assert!(!steps.contains(&Step::Finished));
        program.completed(4, &mut steps);
        assert_eq!(steps.last(), Some(&Step::Finished));
    }

    #[test]
    fn an_iteration_of_vgg16_takes_what_its_multiply_adds_say() {
        let (time, elements, iterations) = play(&mut program(&training(1.0, 0.0, 2, None)));
        assert_eq!((elements, iterations), (2 * 138_357_544, 2));
        // 15.47 giga multiply-adds, times 2, 3 passes, 32 images, 2 iterations, at 10 TFLOP/s.
        let expected = 15.47e9 * 2.0 * 3.0 * 32.0 * 2.0 / 1e13;
        assert!((time.as_secs_f64() / expected - 1.0).abs() < 0.01, "{time:?} beside {expected}");
    }

    #[test]
    fn a_scale_divides_parameters_and_times_alike() {
        let (whole, ..) = play(&mut program(&training(1.0, 0.0, 1, None)));
        let (time, elements, _) = play(&mut program(&training(100.0, 0.0, 1, None)));
        assert_eq!(elements, 1_383_575);
        assert!((time.as_secs_f64() * 100.0 / whole.as_secs_f64() - 1.0).abs() < 1e-3);
        // Nothing is left of most layers; the program still iterates.
        let (_, elements, _) = play(&mut program(&training(1e9, 0.0, 1, None)));
        assert_eq!(elements, 1);
    }

    #[test]
    fn a_worker_that_was_started_again_does_the_rest() {
        let (_, elements, _) = play(&mut program(&training(100.0, 0.0, 2, None)));
        let mut again = program(&training(100.0, 0.0, 2, None));
        let gradients = {
            let Schedule::Training(training) = &*again.schedule.clone() else { panic!("it trains") };
            training.gradients.len() as u64
        };
        let mut steps = Vec::new();
        again.start(&mut steps);
        steps.clear();
        // It died in its first forward pass, and the others were told of one iteration and one
        // gradient.
        again.go_on_from(gradients, &mut steps);
        assert_eq!(steps[0], Step::Iterated);
        let (mut time, mut rest, mut over) = (0, 0, false);
        while !over {
            for step in std::mem::take(&mut steps) {
                match step {
                    Step::Submit { tensor, elements } => {
                        rest += elements;
                        again.completed(tensor, &mut steps);
                    }
                    Step::Wait(_) => {
                        time += 1;
                        again.timer(&mut steps);
                    }
                    Step::Iterated => {}
                    Step::Finished => over = true,
                }
            }
        }
        assert_eq!((rest * 2, time), (elements, gradients + 1));
    }

    #[test]
    fn jitter_and_pauses_change_the_time_within_their_bounds() {
        let (even, ..) = play(&mut program(&training(10.0, 0.0, 4, None)));
        let (uneven, ..) = play(&mut program(&training(10.0, 0.1, 4, None)));
        assert_ne!(even, uneven);
        assert!((uneven.as_secs_f64() / even.as_secs_f64() - 1.0).abs() < 0.1);
        let (paused, ..) = play(&mut program(&training(10.0, 0.0, 4, Some((2, Duration::from_secs(1))))));
        assert_eq!(paused, even + Duration::from_secs(1));
    }
}
