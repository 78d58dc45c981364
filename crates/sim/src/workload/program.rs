//! What one worker does: when it submits which tensor. It knows no network; the actors around it ask and tell.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use oorandom::Rand64;

use super::models::Layer;
use super::scenario::Workload;

/// What the worker wants next.
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

/// The workload as all workers of a job see it.
#[derive(Clone, Debug)]
pub(crate) enum Schedule {
    AllReduce { elements: usize, in_flight: u32, count: Option<u64> },
    Training(Training),
}

/// An iteration, laid out.
#[derive(Clone, Debug)]
pub(crate) struct Training {
    forward: Duration,
    /// By gradient, in the order of back-propagation: how long it takes to compute, and its elements.
    gradients: Vec<(Duration, usize)>,
    iterations: Option<u64>,
    jitter: f64,
    pause: Option<(u64, Duration)>,
}

impl Schedule {
    pub(crate) fn new(workload: &Workload) -> Self {
        match *workload {
            Workload::AllReduce { elements, in_flight, count } => {
                Self::AllReduce { elements, in_flight, count }
            }
            Workload::Training { model, batch, iterations, scale, flops_per_s, jitter, pause } => {
                let scaled = Scaled { batch, scale, flops_per_s };
                let (forward, gradients) = scaled.iteration(&model.layers());
                Self::Training(Training { forward, gradients, iterations, jitter, pause })
            }
        }
    }

    /// Where fragment `sequence` of a machine's stream is: its tensor, and its number within it. The machine has the
    /// elements of each tensor that `part` says, `fragment` in a packet.
    pub(crate) fn locate(&self, sequence: u64, fragment: usize, part: impl Fn(u64) -> usize) -> (u64, u32) {
        let mut left = sequence;
        for tensor in 0.. {
            let fragments = part(tensor).div_ceil(fragment) as u64;
            if left < fragments {
                return (tensor, left as u32);
            }
            left -= fragments;
        }
        unreachable!("a stream has no end")
    }

    /// Elements of what throughput is counted in: a tensor of the micro-benchmark, an iteration of training.
    pub(crate) fn elements_counted(&self) -> usize {
        match self {
            Self::AllReduce { elements, .. } => *elements,
            Self::Training(training) => training.gradients.iter().map(|(_, elements)| elements).sum(),
        }
    }

    /// The layer of a tensor: of training each gradient's is one, and back-propagation begins with the last.
    pub(crate) fn layer(&self, tensor: u64) -> fanin_protocol::Layer {
        match self {
            Self::AllReduce { .. } => fanin_protocol::Layer::default(),
            Self::Training(training) => {
                let count = training.gradients.len();
                let index = count - 1 - (tensor % count as u64) as usize;
                let within = |number: usize| u16::try_from(number).unwrap_or(u16::MAX);
                fanin_protocol::Layer { index: within(index), count: within(count) }
            }
        }
    }

    /// Elements of a tensor.
    pub(crate) fn elements(&self, tensor: u64) -> usize {
        match self {
            Self::AllReduce { elements, .. } => *elements,
            Self::Training(training) => {
                training.gradients[(tensor % training.gradients.len() as u64) as usize].1
            }
        }
    }
}

struct Scaled {
    batch: u32,
    scale: f64,
    flops_per_s: f64,
}

impl Scaled {
    /// Forward time, and the gradients. What the scale leaves of all layers together is rounded, not of each; a layer of
    /// which nothing is left goes with the next.
    fn iteration(&self, layers: &[Layer]) -> (Duration, Vec<(Duration, usize)>) {
        let forward: Duration =
            layers.iter().map(|layer| layer.forward(self.batch, self.flops_per_s)).sum::<Duration>();
        let mut gradients = Vec::new();
        let (mut parameters, mut elements_before, mut waiting) = (0, 0, Duration::ZERO);
        for layer in layers.iter().rev() {
            parameters += layer.parameters;
            waiting += layer.backward(self.batch, self.flops_per_s).div_f64(self.scale);
            let elements_here = (parameters as f64 / self.scale).round() as usize;
            if elements_here > elements_before {
                gradients.push((waiting, elements_here - elements_before));
                (elements_before, waiting) = (elements_here, Duration::ZERO);
            }
        }
        if gradients.is_empty() {
            gradients.push((waiting, 1));
        }
        (forward.div_f64(self.scale), gradients)
    }
}

/// One worker's.
pub(crate) struct Program {
    schedule: Rc<Schedule>,
    dice: Rand64,
    /// The next tensor that it submits.
    next: u64,
    outstanding: BTreeSet<u64>,
    /// Training: iterations completed.
    iteration: u64,
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
    Backward,
    Finished,
}

impl Program {
    pub(crate) fn new(schedule: Rc<Schedule>, seed: u64) -> Self {
        Self {
            schedule,
            dice: Rand64::new(seed.into()),
            next: 0,
            outstanding: BTreeSet::new(),
            iteration: 0,
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

    /// The next tensor that it submits.
    pub(crate) const fn next_tensor(&self) -> u64 {
        self.next
    }

    /// The first tensor that it does not submit if nobody makes it begin more: those of an iteration are one.
    pub(crate) fn committed(&self) -> u64 {
        match (&*self.schedule, self.state) {
            (Schedule::Training(training), State::Paused | State::Forward | State::Backward) => {
                (self.iteration + 1) * training.gradients.len() as u64
            }
            _ => self.next,
        }
    }

    /// Submits nothing from tensor `end` on. All workers of a job have the same: what one has submitted needs all of them.
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
            State::Forward => {
                self.state = State::Backward;
                self.pace = self.draw(training.jitter);
                self.wait_for_gradient(training, 0, steps);
            }
            State::Backward => {
                let index = (self.next % training.gradients.len() as u64) as usize;
                self.submit(training.gradients[index].1, steps);
                if index + 1 < training.gradients.len() {
                    self.wait_for_gradient(training, index + 1, steps);
                }
            }
            State::Idle | State::Finished => {}
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
                // The barrier: parameters are updated when every gradient is there.
                if self.outstanding.is_empty()
                    && self.next == (self.iteration + 1) * training.gradients.len() as u64
                {
                    self.iteration += 1;
                    steps.push(Step::Iterated);
                    self.begin_iteration(training, steps);
                }
            }
        }
        true
    }

    /// Another process takes the worker's place: timers are lost, and of what was under way, what is `from` this tensor on
    /// is submitted again. Everything before is done.
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
                if iteration > self.iteration {
                    (self.iteration, self.state) = (iteration, State::Idle);
                    steps.push(Step::Iterated);
                }
                match self.state {
                    State::Backward => self.wait_for_gradient(training, (from % gradients) as usize, steps),
                    State::Finished => {}
                    _ => self.begin_iteration(training, steps),
                }
            }
        }
    }

    /// The node was away and is back: timers are lost, and nothing else.
    pub(crate) fn restarted(&mut self, steps: &mut Vec<Step>) {
        let Schedule::Training(training) = &*self.schedule.clone() else { return };
        match self.state {
            State::Paused | State::Forward => self.forward(training, steps),
            State::Backward if self.next < (self.iteration + 1) * training.gradients.len() as u64 => {
                let index = (self.next % training.gradients.len() as u64) as usize;
                self.wait_for_gradient(training, index, steps);
            }
            State::Backward | State::Idle | State::Finished => {}
        }
    }

    fn begin_iteration(&mut self, training: &Training, steps: &mut Vec<Step>) {
        if self.is_over() || training.iterations.is_some_and(|most| self.iteration >= most) {
            self.state = State::Finished;
            steps.push(Step::Finished);
            return;
        }
        match training.pause {
            Some((every, length)) if self.iteration > 0 && self.iteration.is_multiple_of(every) => {
                self.state = State::Paused;
                steps.push(Step::Wait(length));
            }
            _ => self.forward(training, steps),
        }
    }

    fn forward(&mut self, training: &Training, steps: &mut Vec<Step>) {
        self.state = State::Forward;
        let pace = self.draw(training.jitter);
        steps.push(Step::Wait(training.forward.mul_f64(pace)));
    }

    fn wait_for_gradient(&self, training: &Training, index: usize, steps: &mut Vec<Step>) {
        steps.push(Step::Wait(training.gradients[index].0.mul_f64(self.pace)));
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
    use super::*;
    use crate::workload::models::Model;

    fn program(workload: &Workload) -> Program {
        Program::new(Rc::new(Schedule::new(workload)), 1)
    }

    fn training(scale: f64, jitter: f64, iterations: u64, pause: Option<(u64, Duration)>) -> Workload {
        Workload::Training {
            model: Model::Vgg16,
            batch: 32,
            iterations: Some(iterations),
            scale,
            flops_per_s: 1e13,
            jitter,
            pause,
        }
    }

    /// Plays a program whose tensors complete at once; returns the virtual time and the elements submitted.
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
    fn a_fragment_is_found_in_its_tensor() {
        let schedule = Schedule::new(&Workload::AllReduce { elements: 1000, in_flight: 1, count: None });
        let part = |tensor| schedule.elements(tensor);
        assert_eq!(schedule.locate(0, 256, part), (0, 0));
        assert_eq!(schedule.locate(3, 256, part), (0, 3));
        assert_eq!(schedule.locate(4, 256, part), (1, 0));
        assert_eq!(schedule.locate(4, 256, |tensor| if tensor == 1 { 0 } else { 1000 }), (2, 0));
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
        // It died in its first forward pass, and the others were told of one iteration and one gradient.
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
