//! Models that people train: what each layer weighs, and how long it takes.
//!
//! Nothing here is a measured table. A model is written down as its architecture defines it
//! (kernels, channels, strides), and the counts follow. The tests compare every total with the one
//! that its authors publish. A convolution and the normalisation behind it are one layer: their
//! gradients come one right after the other.
//!
//! Times follow from multiply-adds: a forward pass of a layer takes
//! `2 * multiply_adds * batch / flops_per_s`, the backward pass twice that (a gradient by the input
//! and one by the weights). The times of memory-bound layers are left out; it is a model of how
//! long the network has, not of a GPU.

use std::time::Duration;

#[cfg(test)]
mod tests;
mod ugatit;

/// The speed of an RTX 2080 Ti, the ATP paper's GPU, on a good day: three quarters of its 13.4
/// TFLOP/s.
pub const FLOPS_PER_S: f64 = 10e12;

/// A layer with parameters, or several without that lie before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layer {
    /// Parameters, which is also the elements of its gradient.
    pub parameters: u64,
    /// Multiply-adds of one sample's forward pass.
    pub multiply_adds: u64,
    /// Whether it belongs to an auxiliary classifier, which only training has.
    pub auxiliary: bool,
    /// How many of the parameters' tensors are vectors (biases, a normalisation's scale and shift),
    /// and how long each is.
    pub vectors: (u64, u64),
}

/// A model by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Model {
    AlexNet,
    Vgg11,
    Vgg16,
    Vgg19,
    ResNet18,
    ResNet34,
    ResNet50,
    ResNet101,
    ResNet152,
    DenseNet121,
    DenseNet169,
    DenseNet201,
    InceptionV3,
    GoogleNet,
    BertBase,
    BertLarge,
    Gpt2,
    Transformer,
    Ugatit,
}

impl Model {
    /// All of them.
    pub const ALL: [Self; 19] = [
        Self::AlexNet,
        Self::Vgg11,
        Self::Vgg16,
        Self::Vgg19,
        Self::ResNet18,
        Self::ResNet34,
        Self::ResNet50,
        Self::ResNet101,
        Self::ResNet152,
        Self::DenseNet121,
        Self::DenseNet169,
        Self::DenseNet201,
        Self::InceptionV3,
        Self::GoogleNet,
        Self::BertBase,
        Self::BertLarge,
        Self::Gpt2,
        Self::Transformer,
        Self::Ugatit,
    ];

    /// Its name in scenarios and reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::AlexNet => "alexnet",
            Self::Vgg11 => "vgg11",
            Self::Vgg16 => "vgg16",
            Self::Vgg19 => "vgg19",
            Self::ResNet18 => "resnet18",
            Self::ResNet34 => "resnet34",
            Self::ResNet50 => "resnet50",
            Self::ResNet101 => "resnet101",
            Self::ResNet152 => "resnet152",
            Self::DenseNet121 => "densenet121",
            Self::DenseNet169 => "densenet169",
            Self::DenseNet201 => "densenet201",
            Self::InceptionV3 => "inception-v3",
            Self::GoogleNet => "googlenet",
            Self::BertBase => "bert-base",
            Self::BertLarge => "bert-large",
            Self::Gpt2 => "gpt2",
            Self::Transformer => "transformer",
            Self::Ugatit => "ugatit",
        }
    }

    /// The name of a sample, for reports: images, or sequences of tokens.
    #[must_use]
    pub const fn sample(self) -> &'static str {
        match self {
            Self::BertBase | Self::BertLarge | Self::Gpt2 | Self::Transformer => "sequences",
            _ => "images",
        }
    }

    /// Its layers, in the order of the forward pass.
    #[must_use]
    pub fn layers(self) -> Vec<Layer> {
        match self {
            Self::AlexNet => alexnet(),
            Self::Vgg11 => vgg([1, 1, 2, 2, 2]),
            Self::Vgg16 => vgg([2, 2, 3, 3, 3]),
            Self::Vgg19 => vgg([2, 2, 4, 4, 4]),
            Self::ResNet18 => resnet(Block::Basic, [2, 2, 2, 2]),
            Self::ResNet34 => resnet(Block::Basic, [3, 4, 6, 3]),
            Self::ResNet50 => resnet(Block::Bottleneck, [3, 4, 6, 3]),
            Self::ResNet101 => resnet(Block::Bottleneck, [3, 4, 23, 3]),
            Self::ResNet152 => resnet(Block::Bottleneck, [3, 8, 36, 3]),
            Self::DenseNet121 => densenet([6, 12, 24, 16]),
            Self::DenseNet169 => densenet([6, 12, 32, 32]),
            Self::DenseNet201 => densenet([6, 12, 48, 32]),
            Self::InceptionV3 => inception_v3(),
            Self::GoogleNet => googlenet(),
            Self::BertBase => bert(12, 768),
            Self::BertLarge => bert(24, 1024),
            Self::Gpt2 => gpt2(),
            Self::Transformer => transformer(),
            Self::Ugatit => ugatit::ugatit(),
        }
    }
}

impl Layer {
    /// The parameters of each of its tensors: the weights, if it has any, and the vectors.
    pub fn tensors(&self) -> impl Iterator<Item = u64> {
        let (count, length) = self.vectors;
        let weights = self.parameters - count * length;
        (weights > 0).then_some(weights).into_iter().chain((0..count).map(move |_| length))
    }

    /// How long its forward pass takes.
    #[must_use]
    pub fn forward(&self, batch: u32, flops_per_s: f64) -> Duration {
        Duration::from_secs_f64(2.0 * self.multiply_adds as f64 * f64::from(batch) / flops_per_s)
    }

    /// How long its backward pass takes.
    #[must_use]
    pub fn backward(&self, batch: u32, flops_per_s: f64) -> Duration {
        self.forward(batch, flops_per_s) * 2
    }
}

/// Layers of a convolutional network, stacked one on the other, and the picture's size in between.
struct Images {
    layers: Vec<Layer>,
    channels: u64,
    height: u64,
    width: u64,
    auxiliary: bool,
}

/// A kernel's height and width.
type Kernel = (u64, u64);

impl Images {
    const fn new(size: u64) -> Self {
        Self { layers: Vec::new(), channels: 3, height: size, width: size, auxiliary: false }
    }

    fn push(&mut self, weights: u64, vectors: (u64, u64), multiply_adds: u64) {
        let parameters = weights + vectors.0 * vectors.1;
        self.layers.push(Layer { parameters, multiply_adds, auxiliary: self.auxiliary, vectors });
    }

    /// A convolution; `extra` parameters a channel: 1 for a bias, 2 for a batch normalisation
    /// behind it.
    fn convolve(&mut self, out: u64, (kh, kw): Kernel, stride: u64, (ph, pw): Kernel, extra: u64) {
        self.height = (self.height + 2 * ph - kh) / stride + 1;
        self.width = (self.width + 2 * pw - kw) / stride + 1;
        let weights = self.channels * out * kh * kw;
        self.push(weights, (extra, out), weights * self.height * self.width);
        self.channels = out;
    }

    /// A square convolution with a bias, padded to keep the size.
    fn plain(&mut self, out: u64, kernel: u64) {
        self.convolve(out, (kernel, kernel), 1, (kernel / 2, kernel / 2), 1);
    }

    /// A square convolution with a batch normalisation.
    fn normalised(&mut self, out: u64, kernel: u64, stride: u64, padding: u64) {
        self.convolve(out, (kernel, kernel), stride, (padding, padding), 2);
    }

    /// A square convolution that adds `more` channels to the `before` ones, with a normalisation of
    /// all of them behind it.
    fn grow(&mut self, before: u64, more: u64, kernel: u64) {
        let weights = self.channels * more * kernel * kernel;
        self.channels = before + more;
        self.push(weights, (2, self.channels), weights * self.height * self.width);
    }

    /// A pooling; `ceil` as in its definition, where the last window may hang over.
    const fn pool(&mut self, kernel: u64, stride: u64, padding: u64, ceil: bool) {
        let over = if ceil { stride - 1 } else { 0 };
        self.height = (self.height + 2 * padding - kernel + over) / stride + 1;
        self.width = (self.width + 2 * padding - kernel + over) / stride + 1;
    }

    /// Averages the picture to `size`.
    const fn average_to(&mut self, size: u64) {
        (self.height, self.width) = (size, size);
    }

    /// A fully connected layer over all that there is.
    fn connect(&mut self, out: u64) {
        let inputs = self.channels * self.height * self.width;
        self.push(inputs * out, (1, out), inputs * out);
        (self.channels, self.height, self.width) = (out, 1, 1);
    }

    /// Runs `branches` side by side from here; their channels are joined.
    fn branch(&mut self, branches: &[&dyn Fn(&mut Self)]) {
        let (channels, height, width) = (self.channels, self.height, self.width);
        let mut joined = 0;
        for branch in branches {
            (self.channels, self.height, self.width) = (channels, height, width);
            branch(self);
            joined += self.channels;
        }
        self.channels = joined;
    }

    /// An auxiliary classifier beside what follows.
    fn aside(&mut self, classifier: impl Fn(&mut Self)) {
        let here = (self.channels, self.height, self.width);
        self.auxiliary = true;
        classifier(self);
        self.auxiliary = false;
        (self.channels, self.height, self.width) = here;
    }
}

/// Krizhevsky's "one weird trick" variant, as torchvision has it.
fn alexnet() -> Vec<Layer> {
    let mut net = Images::new(224);
    net.convolve(64, (11, 11), 4, (2, 2), 1);
    net.pool(3, 2, 0, false);
    net.plain(192, 5);
    net.pool(3, 2, 0, false);
    net.plain(384, 3);
    net.plain(256, 3);
    net.plain(256, 3);
    net.pool(3, 2, 0, false);
    net.average_to(6);
    net.connect(4096);
    net.connect(4096);
    net.connect(1000);
    net.layers
}

/// Simonyan and Zisserman, configurations A, D and E, without batch normalisation.
fn vgg(depths: [usize; 5]) -> Vec<Layer> {
    let mut net = Images::new(224);
    for (depth, channels) in depths.into_iter().zip([64, 128, 256, 512, 512]) {
        for _ in 0..depth {
            net.plain(channels, 3);
        }
        net.pool(2, 2, 0, false);
    }
    net.connect(4096);
    net.connect(4096);
    net.connect(1000);
    net.layers
}

#[derive(Clone, Copy)]
enum Block {
    Basic,
    Bottleneck,
}

/// He et al., with the stride in the bottleneck's 3x3 as everybody has it today (v1.5).
fn resnet(block: Block, depths: [usize; 4]) -> Vec<Layer> {
    let mut net = Images::new(224);
    net.normalised(64, 7, 2, 3);
    net.pool(3, 2, 1, false);
    for (stage, (depth, width)) in depths.into_iter().zip([64, 128, 256, 512]).enumerate() {
        for i in 0..depth {
            let stride = if stage > 0 && i == 0 { 2 } else { 1 };
            let before = (net.channels, net.height, net.width);
            let out = match block {
                Block::Basic => {
                    net.normalised(width, 3, stride, 1);
                    net.normalised(width, 3, 1, 1);
                    width
                }
                Block::Bottleneck => {
                    net.normalised(width, 1, 1, 0);
                    net.normalised(width, 3, stride, 1);
                    net.normalised(4 * width, 1, 1, 0);
                    4 * width
                }
            };
            if stride > 1 || before.0 != out {
                // The shortcut's projection.
                (net.channels, net.height, net.width) = before;
                net.normalised(out, 1, stride, 0);
            }
        }
    }
    net.average_to(1);
    net.connect(1000);
    net.layers
}

/// Huang et al.: the picture's normalisations stand before their convolutions. Here each counts to
/// the convolution before it; the first convolution has two, one of them behind a pooling.
fn densenet(depths: [usize; 4]) -> Vec<Layer> {
    let mut net = Images::new(224);
    net.convolve(64, (7, 7), 2, (3, 3), 4);
    net.pool(3, 2, 1, false);
    for (block, depth) in depths.into_iter().enumerate() {
        if block > 0 {
            net.normalised(net.channels / 2, 1, 1, 0);
            net.pool(2, 2, 0, false);
        }
        for _ in 0..depth {
            let before = net.channels;
            net.normalised(128, 1, 1, 0);
            net.grow(before, 32, 3);
        }
    }
    net.average_to(1);
    net.connect(1000);
    net.layers
}

/// Szegedy et al. 2014 as torchvision has it: batch-normalised, and 3x3 where the paper has 5x5.
fn googlenet() -> Vec<Layer> {
    fn inception(net: &mut Images, one: u64, three: (u64, u64), five: (u64, u64), pool: u64) {
        net.branch(&[
            &|net| net.normalised(one, 1, 1, 0),
            &|net| {
                net.normalised(three.0, 1, 1, 0);
                net.normalised(three.1, 3, 1, 1);
            },
            &|net| {
                net.normalised(five.0, 1, 1, 0);
                net.normalised(five.1, 3, 1, 1);
            },
            &|net| net.normalised(pool, 1, 1, 0),
        ]);
    }
    fn classifier(net: &mut Images) {
        net.average_to(4);
        net.normalised(128, 1, 1, 0);
        net.connect(1024);
        net.connect(1000);
    }
    let mut net = Images::new(224);
    net.normalised(64, 7, 2, 3);
    net.pool(3, 2, 0, true);
    net.normalised(64, 1, 1, 0);
    net.normalised(192, 3, 1, 1);
    net.pool(3, 2, 0, true);
    inception(&mut net, 64, (96, 128), (16, 32), 32);
    inception(&mut net, 128, (128, 192), (32, 96), 64);
    net.pool(3, 2, 0, true);
    inception(&mut net, 192, (96, 208), (16, 48), 64);
    net.aside(classifier);
    inception(&mut net, 160, (112, 224), (24, 64), 64);
    inception(&mut net, 128, (128, 256), (24, 64), 64);
    inception(&mut net, 112, (144, 288), (32, 64), 64);
    net.aside(classifier);
    inception(&mut net, 256, (160, 320), (32, 128), 128);
    net.pool(2, 2, 0, true);
    inception(&mut net, 256, (160, 320), (32, 128), 128);
    inception(&mut net, 384, (192, 384), (48, 128), 128);
    net.average_to(1);
    net.connect(1000);
    net.layers
}

/// Szegedy et al. 2015 as torchvision has it.
fn inception_v3() -> Vec<Layer> {
    fn row(net: &mut Images, out: u64, kernel: u64) {
        net.convolve(out, (1, kernel), 1, (0, kernel / 2), 2);
    }
    fn column(net: &mut Images, out: u64, kernel: u64) {
        net.convolve(out, (kernel, 1), 1, (kernel / 2, 0), 2);
    }
    fn a(net: &mut Images, pool: u64) {
        net.branch(&[
            &|net| net.normalised(64, 1, 1, 0),
            &|net| {
                net.normalised(48, 1, 1, 0);
                net.normalised(64, 5, 1, 2);
            },
            &|net| {
                net.normalised(64, 1, 1, 0);
                net.normalised(96, 3, 1, 1);
                net.normalised(96, 3, 1, 1);
            },
            &|net| net.normalised(pool, 1, 1, 0),
        ]);
    }
    fn c(net: &mut Images, width: u64) {
        net.branch(&[
            &|net| net.normalised(192, 1, 1, 0),
            &|net| {
                net.normalised(width, 1, 1, 0);
                row(net, width, 7);
                column(net, 192, 7);
            },
            &|net| {
                net.normalised(width, 1, 1, 0);
                column(net, width, 7);
                row(net, width, 7);
                column(net, width, 7);
                row(net, 192, 7);
            },
            &|net| net.normalised(192, 1, 1, 0),
        ]);
    }
    fn e(net: &mut Images) {
        net.branch(&[
            &|net| net.normalised(320, 1, 1, 0),
            &|net| {
                net.normalised(384, 1, 1, 0);
                net.branch(&[&|net| row(net, 384, 3), &|net| column(net, 384, 3)]);
            },
            &|net| {
                net.normalised(448, 1, 1, 0);
                net.normalised(384, 3, 1, 1);
                net.branch(&[&|net| row(net, 384, 3), &|net| column(net, 384, 3)]);
            },
            &|net| net.normalised(192, 1, 1, 0),
        ]);
    }
    let mut net = Images::new(299);
    net.normalised(32, 3, 2, 0);
    net.normalised(32, 3, 1, 0);
    net.normalised(64, 3, 1, 1);
    net.pool(3, 2, 0, false);
    net.normalised(80, 1, 1, 0);
    net.normalised(192, 3, 1, 0);
    net.pool(3, 2, 0, false);
    a(&mut net, 32);
    a(&mut net, 64);
    a(&mut net, 64);
    net.branch(&[
        &|net| net.normalised(384, 3, 2, 0),
        &|net| {
            net.normalised(64, 1, 1, 0);
            net.normalised(96, 3, 1, 1);
            net.normalised(96, 3, 2, 0);
        },
        &|net| net.pool(3, 2, 0, false),
    ]);
    c(&mut net, 128);
    c(&mut net, 160);
    c(&mut net, 160);
    c(&mut net, 192);
    net.aside(|net| {
        net.pool(5, 3, 0, false);
        net.normalised(128, 1, 1, 0);
        net.normalised(768, 5, 1, 0);
        net.connect(1000);
    });
    net.branch(&[
        &|net| {
            net.normalised(192, 1, 1, 0);
            net.normalised(320, 3, 2, 0);
        },
        &|net| {
            net.normalised(192, 1, 1, 0);
            row(net, 192, 7);
            column(net, 192, 7);
            net.normalised(192, 3, 2, 0);
        },
        &|net| net.pool(3, 2, 0, false),
    ]);
    e(&mut net);
    e(&mut net);
    net.average_to(1);
    net.connect(1000);
    net.layers
}

/// Layers of a network of tokens.
struct Tokens {
    layers: Vec<Layer>,
    /// Width of the model.
    width: u64,
    /// Tokens of a sequence.
    length: u64,
}

impl Tokens {
    const fn new(width: u64, length: u64) -> Self {
        Self { layers: Vec::new(), width, length }
    }

    fn push(&mut self, weights: u64, vectors: (u64, u64), multiply_adds: u64) {
        let parameters = weights + vectors.0 * vectors.1;
        self.layers.push(Layer { parameters, multiply_adds, auxiliary: false, vectors });
    }

    /// Tables that are looked up, of as many entries in all; `normalised` where a layer norm
    /// follows.
    fn embed(&mut self, entries: u64, normalised: bool) {
        let norm = if normalised { 2 } else { 0 };
        self.push(entries * self.width, (norm, self.width), 0);
    }

    fn project(&mut self, inputs: u64, outputs: u64) {
        self.push(inputs * outputs, (1, outputs), inputs * outputs * self.length);
    }

    fn normalise(&mut self) {
        self.push(0, (2, self.width), 0);
    }

    /// Query, key and value in one, the attention itself, the output, a layer norm.
    fn attend(&mut self) {
        let width = self.width;
        let scores = 2 * self.length * self.length * width;
        let projections = 3 * width * width;
        self.push(projections, (1, 3 * width), projections * self.length + scores);
        self.project(width, width);
        self.normalise();
    }

    /// Two layers, four times as wide in between, and a layer norm.
    fn feed_forward(&mut self) {
        self.project(self.width, 4 * self.width);
        self.project(4 * self.width, self.width);
        self.normalise();
    }

    /// The projection onto a vocabulary whose table is the embedding's: work, but no parameters of
    /// its own.
    fn tied_output(&mut self, vocabulary: u64) {
        self.push(0, (0, 0), vocabulary * self.width * self.length);
    }
}

/// Devlin et al.: the encoder with its pooler, uncased vocabulary; sequences of 128 tokens, as in
/// most of its pre-training.
fn bert(depth: usize, width: u64) -> Vec<Layer> {
    let mut net = Tokens::new(width, 128);
    net.embed(30_522 + 512 + 2, true);
    for _ in 0..depth {
        net.attend();
        net.feed_forward();
    }
    net.push(width * width, (1, width), width * width);
    net.layers
}

/// Radford et al., the small model; sequences of 1,024 tokens.
fn gpt2() -> Vec<Layer> {
    let mut net = Tokens::new(768, 1024);
    net.embed(50_257 + 1024, false);
    for _ in 0..12 {
        net.attend();
        net.feed_forward();
    }
    net.normalise();
    net.tied_output(50_257);
    net.layers
}

/// Vaswani et al., the base model. It has one vocabulary of 37,000 byte pairs, whose table encoder,
/// decoder and output share, and a last norm behind both stacks as torch's `nn.Transformer` has.
/// Sequences of 32 tokens on either side, about a sentence.
fn transformer() -> Vec<Layer> {
    const VOCABULARY: u64 = 37_000;
    let mut net = Tokens::new(512, 32);
    net.embed(VOCABULARY, false);
    for _ in 0..6 {
        net.attend();
        net.feed_forward();
    }
    net.normalise();
    for _ in 0..6 {
        net.attend();
        net.attend();
        net.feed_forward();
    }
    net.normalise();
    net.tied_output(VOCABULARY);
    net.layers
}
