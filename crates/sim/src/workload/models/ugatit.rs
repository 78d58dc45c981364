//! Kim et al., U-GAT-IT, as its authors' PyTorch code has it (the full model, images of 256 x 256).
//! It has two generators, from each kind of image to the other, and for each kind a global and a
//! local discriminator.
//!
//! A step goes through the networks more than once. Generators go eight times forward (six of them
//! also backward: there, back again, and onto itself, of each). Discriminators go twelve times
//! (eight of them for their own gradients, four only through them to the generators). A layer's
//! multiply-adds are a third of all that, so that forward once and backward twice take as long. Its
//! gradient comes where it would in one backward pass, the discriminators' first. A sample is an
//! image of each kind.

use super::{Images, Layer};

const SIZE: u64 = 256;
/// Channels of the first layer.
const WIDTH: u64 = 64;
/// The blocks of the bottleneck, each way.
const BLOCKS: u64 = 4;
/// Layers of a discriminator, as its authors count them.
const GLOBAL: u32 = 7;
const LOCAL: u32 = 5;
/// For each of two generators: forward passes, and backward passes, which take twice as long.
const GENERATED: u64 = (8 + 2 * 6) / 2;
/// For each of four discriminators: forward, backward for its own gradients, and backward only
/// through it, which takes as long as forward.
const JUDGED: u64 = (12 + 2 * 8 + 4) / 4;

pub(super) fn ugatit() -> Vec<Layer> {
    let generators = (0..2).flat_map(|_| passed(generator(), GENERATED));
    let discriminators = [GLOBAL, GLOBAL, LOCAL, LOCAL].into_iter();
    let discriminators = discriminators.flat_map(|layers| passed(discriminator(layers), JUDGED));
    generators.chain(discriminators).collect()
}

/// Layers through which a step goes so many times forward, if forward once and backward twice is
/// three times.
fn passed(mut layers: Vec<Layer>, times: u64) -> Vec<Layer> {
    for layer in &mut layers {
        layer.multiply_adds = layer.multiply_adds * times / 3;
    }
    layers
}

fn generator() -> Vec<Layer> {
    let mut net = Images::new(SIZE);
    let same = |net: &mut Images, out, extra| net.convolve(out, (3, 3), 1, (1, 1), extra);
    net.convolve(WIDTH, (7, 7), 1, (3, 3), 0);
    net.convolve(2 * WIDTH, (3, 3), 2, (1, 1), 0);
    net.convolve(4 * WIDTH, (3, 3), 2, (1, 1), 0);
    let width = net.channels;
    for _ in 0..2 * BLOCKS {
        same(&mut net, width, 0);
    }
    let area = net.height * net.width;
    attend(&mut net);
    // Gamma and beta of the layers behind, of the whole picture.
    net.push(area * width * width, (0, 0), area * width * width);
    for _ in 0..3 {
        net.push(width * width, (0, 0), width * width);
    }
    for _ in 0..2 * BLOCKS {
        same(&mut net, width, 1);
    }
    for out in [2 * WIDTH, WIDTH] {
        (net.height, net.width) = (2 * net.height, 2 * net.width);
        same(&mut net, out, 3);
    }
    net.convolve(3, (7, 7), 1, (3, 3), 0);
    net.layers
}

fn discriminator(layers: u32) -> Vec<Layer> {
    let mut net = Images::new(SIZE);
    net.convolve(WIDTH, (4, 4), 2, (1, 1), 1);
    for _ in 1..layers - 2 {
        net.convolve(2 * net.channels, (4, 4), 2, (1, 1), 1);
    }
    net.convolve(2 * net.channels, (4, 4), 1, (1, 1), 1);
    attend(&mut net);
    net.convolve(1, (4, 4), 1, (1, 1), 0);
    net.layers
}

/// A class activation map: a weight for each channel from the mean and one from the maximum, and
/// both pictures in one again.
fn attend(net: &mut Images) {
    let width = net.channels;
    net.push(0, (2, width), 2 * width);
    net.channels = 2 * width;
    net.convolve(width, (1, 1), 1, (0, 0), 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parameters(layers: &[Layer]) -> u64 {
        layers.iter().map(|layer| layer.parameters).sum()
    }

    /// Counted in the authors' networks.py; together they are the 670.8 million that others report
    /// of U-GAT-IT.
    #[test]
    fn its_networks_have_as_many_parameters_as_the_authors_code() {
        assert_eq!(parameters(&generator()), 278_959_808);
        assert_eq!(parameters(&discriminator(GLOBAL)), 53_130_176);
        assert_eq!(parameters(&discriminator(LOCAL)), 3_290_560);
    }

    #[test]
    fn a_step_goes_through_its_networks_as_often_as_the_authors_code() {
        let work = |layers: &[Layer]| layers.iter().map(|layer| layer.multiply_adds).sum::<u64>() as f64;
        let nets = |layers| 2.0 * work(&discriminator(layers));
        // D's step: two generated, eight judged, forward and back. G's step: six generated, forward
        // and back; four judged, and back through them without gradients of their own.
        let step = (2.0 + 3.0 * 6.0) * work(&generator()) + (2.0 * 3.0 + 2.0) * (nets(GLOBAL) + nets(LOCAL));
        let ours = 3.0 * work(&ugatit());
        assert!((ours / step - 1.0).abs() < 1e-6, "{ours} beside {step}");
        // The work of a generator: 3x3 layers of 256 channels on 64 x 64 points are most of it.
        assert!((work(&generator()) / 1e9 - 52.0).abs() < 1.0, "{}", work(&generator()));
    }
}
