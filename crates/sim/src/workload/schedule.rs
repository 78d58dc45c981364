//! A workload laid out: which tensors an iteration has, how long computing them takes, and in which
//! order they are sent. All workers of a job have the same.

use std::time::Duration;

use fanin_plan::{Partition, send_order};

use super::scenario::{SendOrder, TimedLayer, Workload};

/// The workload as all workers of a job see it.
#[derive(Clone, Debug)]
pub(crate) enum Schedule {
    AllReduce { elements: usize, in_flight: u32, count: Option<u64> },
    Training(Training),
}

/// An iteration, laid out.
#[derive(Clone, Debug)]
pub(crate) struct Training {
    /// A whole forward pass.
    pub(super) forward: Duration,
    /// In the order of back-propagation.
    pub(super) gradients: Vec<Phases>,
    /// Which of them each tensor of an iteration is: they are sent in this order.
    pub(super) order: Vec<usize>,
    /// The tensor of an iteration that each gradient is.
    pub(super) places: Vec<usize>,
    /// Whether a layer's forward pass waits for its own parameters alone, and not for those of all.
    /// With `after_step` it waits for nothing. The next step then waits for all answers.
    pub(super) overlap: bool,
    /// Whether nothing is sent before the last gradient is made: a step comes between.
    pub(super) after_step: bool,
    pub(super) iterations: Option<u64>,
    pub(super) jitter: f64,
    pub(super) pause: Option<(u64, Duration)>,
}

/// A gradient, with what is computed for it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Phases {
    /// How long the forward pass of its layers takes ..
    pub(super) forward: Duration,
    /// .. and the backward pass.
    pub(super) backward: Duration,
    pub(super) elements: usize,
}

impl Schedule {
    pub(crate) fn new(workload: &Workload) -> Self {
        match workload {
            &Workload::AllReduce { elements, in_flight, count } => {
                Self::AllReduce { elements, in_flight, count }
            }
            Workload::Training {
                trained,
                batch,
                iterations,
                scale,
                jitter,
                pause,
                overlap,
                partition,
                order,
            } => {
                let (forward, gradients) = scaled(&trained.layers(*batch), *scale, *partition);
                let order = match order {
                    SendOrder::Ready => (0..gradients.len()).collect(),
                    SendOrder::Needed { seconds_a_byte } => by_need(&gradients, *seconds_a_byte),
                };
                let mut places = vec![0; order.len()];
                order.iter().enumerate().for_each(|(place, gradient)| places[*gradient] = place);
                Self::Training(Training {
                    forward,
                    gradients,
                    order,
                    places,
                    overlap: *overlap,
                    after_step: false,
                    iterations: *iterations,
                    jitter: *jitter,
                    pause: *pause,
                })
            }
        }
    }

    /// The same, where workers step their own optimizers and send what that changed.
    pub(crate) fn after_step(mut self) -> Self {
        if let Self::Training(training) = &mut self {
            training.after_step = true;
        }
        self
    }

    /// Tensors after which the variables come again: an iteration's, or without a model one.
    pub(crate) fn period(&self) -> u64 {
        match self {
            Self::AllReduce { .. } => 1,
            Self::Training(training) => training.order.len() as u64,
        }
    }

    /// The place of fragment `sequence` in a machine's stream: its tensor, and its number within
    /// it. The machine has the elements of each tensor that `part` says, `fragment` in a packet.
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

    /// Elements of what throughput is counted in: a tensor of the micro-benchmark, an iteration of
    /// training.
    pub(crate) fn elements_counted(&self) -> usize {
        match self {
            Self::AllReduce { elements, .. } => *elements,
            Self::Training(training) => training.gradients.iter().map(|of| of.elements).sum(),
        }
    }

    /// Elements of each tensor of an iteration; without a model of the one that comes again and
    /// again.
    pub(crate) fn iteration(&self) -> Vec<usize> {
        match self {
            Self::AllReduce { elements, .. } => vec![*elements],
            Self::Training(training) => {
                training.order.iter().map(|gradient| training.gradients[*gradient].elements).collect()
            }
        }
    }

    /// Whether a tensor is the first of its step: an iteration's first gradient, or without a model
    /// any.
    pub(crate) fn begins_step(&self, tensor: u64) -> bool {
        match self {
            Self::AllReduce { .. } => true,
            Self::Training(training) => tensor.is_multiple_of(training.gradients.len() as u64),
        }
    }

    /// Which of the model's variables a tensor is the gradient of, counted from the front; without
    /// a model each is another.
    pub(crate) fn variable(&self, tensor: u64) -> u64 {
        match self {
            Self::AllReduce { .. } => tensor,
            Self::Training(training) => (training.gradients.len() - 1 - training.gradient(tensor)) as u64,
        }
    }

    /// The layer of a tensor: of training each gradient's is one, and back-propagation begins with
    /// the last.
    pub(crate) fn layer(&self, tensor: u64) -> fanin_protocol::Layer {
        match self {
            Self::AllReduce { .. } => fanin_protocol::Layer::default(),
            Self::Training(training) => {
                let within = |number: u64| u16::try_from(number).unwrap_or(u16::MAX);
                let count = training.gradients.len() as u64;
                fanin_protocol::Layer { index: within(self.variable(tensor)), count: within(count) }
            }
        }
    }

    /// Elements of a tensor.
    pub(crate) fn elements(&self, tensor: u64) -> usize {
        match self {
            Self::AllReduce { elements, .. } => *elements,
            Self::Training(training) => training.gradients[training.gradient(tensor)].elements,
        }
    }
}

impl Training {
    /// Which gradient a tensor is.
    pub(super) fn gradient(&self, tensor: u64) -> usize {
        self.order[(tensor % self.order.len() as u64) as usize]
    }

    /// How many gradients have been made, all iterations together, where all tensors before this
    /// one were sent.
    pub(super) fn made_for(&self, tensor: u64) -> u64 {
        let count = self.order.len() as u64;
        let sent = &self.order[..(tensor % count) as usize];
        tensor / count * count + sent.iter().max().map_or(0, |last| *last as u64 + 1)
    }
}

/// The order of sending in which the next forward pass waits least.
fn by_need(gradients: &[Phases], seconds_a_byte: f64) -> Vec<usize> {
    let mut made = Duration::ZERO;
    let partition = |(number, phases): (usize, &Phases)| {
        made += phases.backward;
        Partition {
            ready_s: made.as_secs_f64(),
            needed: (gradients.len() - number) as u64,
            bytes: 4 * phases.elements as u64,
        }
    };
    let partitions: Vec<Partition> = gradients.iter().enumerate().map(partition).collect();
    send_order(&partitions, seconds_a_byte)
}

/// Forward time, and the gradients. The scale is applied to all layers together, and that sum is
/// rounded, not each layer. A layer that becomes empty goes with the next, and one of more elements
/// than `partition` is several gradients that are there at once.
fn scaled(layers: &[TimedLayer], scale: f64, partition: Option<usize>) -> (Duration, Vec<Phases>) {
    let forward: Duration = layers.iter().map(|layer| layer.forward).sum();
    let mut gradients: Vec<Phases> = Vec::new();
    let (mut parameters, mut elements_before, mut waiting) = (0, 0, Phases::default());
    for layer in layers.iter().rev() {
        parameters += layer.parameters;
        waiting.forward += layer.forward.div_f64(scale);
        waiting.backward += layer.backward.div_f64(scale);
        let elements_here = (parameters as f64 / scale).round() as usize;
        if elements_here > elements_before {
            while elements_here > elements_before {
                let left = elements_here - elements_before;
                let elements = partition.map_or(left, |most| most.min(left));
                // The passes of the layer are the first part's: what comes with it takes no time,
                // and its forward pass comes after theirs.
                gradients.push(Phases { elements, ..std::mem::take(&mut waiting) });
                elements_before += elements;
            }
        }
    }
    match gradients.last_mut() {
        // Nothing waits for what is in front of the first gradient.
        Some(front) => front.forward += waiting.forward,
        None => gradients.push(Phases { elements: 1, ..waiting }),
    }
    (forward.div_f64(scale), gradients)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::workload::models::Model;
    use crate::workload::scenario::Trained;

    pub(crate) fn training(
        scale: f64,
        jitter: f64,
        iterations: u64,
        pause: Option<(u64, Duration)>,
    ) -> Workload {
        Workload::Training {
            trained: Trained::Model(Model::Vgg16, 1e13),
            batch: 32,
            iterations: Some(iterations),
            scale,
            jitter,
            pause,
            overlap: false,
            partition: None,
            order: SendOrder::Ready,
        }
    }

    pub(crate) fn overlapping() -> Workload {
        let mut workload = training(100.0, 0.0, 2, None);
        if let Workload::Training { overlap, .. } = &mut workload {
            *overlap = true;
        }
        workload
    }

    pub(crate) fn sorted_partitions() -> Workload {
        let mut workload = overlapping();
        if let Workload::Training { partition, order, .. } = &mut workload {
            // VGG's largest gradient, of a hundredth of 102 million elements, comes early.
            (*partition, *order) = (Some(50_000), SendOrder::Needed { seconds_a_byte: 2e-9 });
        }
        workload
    }

    #[test]
    fn gradients_are_made_in_their_order_and_sent_as_they_are_needed() {
        let schedule = Schedule::new(&sorted_partitions());
        let Schedule::Training(training) = &schedule else { panic!("it trains") };
        assert!(training.gradients.iter().all(|phases| phases.elements <= 50_000));
        let whole = Schedule::new(&overlapping());
        assert_eq!(schedule.elements_counted(), whole.elements_counted());
        let count = training.gradients.len();
        let mut each: Vec<usize> = (0..count as u64).map(|tensor| training.gradient(tensor)).collect();
        assert!(!each.is_sorted(), "front layers overtake");
        each.sort_unstable();
        assert_eq!(each, (0..count).collect::<Vec<_>>());
        for gradient in 0..count {
            assert_eq!(training.gradient(training.places[gradient] as u64), gradient);
            assert_eq!(schedule.variable(training.places[gradient] as u64), (count - 1 - gradient) as u64);
        }
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
}
