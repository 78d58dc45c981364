//! Models beside what their authors publish of them.

use super::*;

fn parameters(model: Model, auxiliary: bool) -> u64 {
    let layers = model.layers();
    layers.iter().filter(|layer| auxiliary || !layer.auxiliary).map(|layer| layer.parameters).sum()
}

#[test]
fn a_models_tensors_are_as_many_as_torchvision_lists_and_have_all_its_parameters() {
    // len(list(model.parameters())) in torchvision.
    let listed = [
        (Model::AlexNet, 16),
        (Model::Vgg16, 32),
        (Model::ResNet18, 62),
        (Model::ResNet50, 161),
        (Model::DenseNet121, 364),
        (Model::InceptionV3, 292),
    ];
    for (model, tensors) in listed {
        let layers = model.layers();
        assert_eq!(layers.iter().flat_map(Layer::tensors).count(), tensors, "{}", model.name());
    }
    for model in Model::ALL {
        let layers = model.layers();
        let all: u64 = layers.iter().flat_map(Layer::tensors).sum();
        assert_eq!(all, layers.iter().map(|layer| layer.parameters).sum::<u64>(), "{}", model.name());
    }
}

#[test]
fn every_model_has_as_many_parameters_as_its_authors_publish() {
    // torchvision's `num_params`; Hugging Face's `num_parameters()` of bert-*-uncased and gpt2.
    let published = [
        (Model::AlexNet, 61_100_840),
        (Model::Vgg11, 132_863_336),
        (Model::Vgg16, 138_357_544),
        (Model::Vgg19, 143_667_240),
        (Model::ResNet18, 11_689_512),
        (Model::ResNet34, 21_797_672),
        (Model::ResNet50, 25_557_032),
        (Model::ResNet101, 44_549_160),
        (Model::ResNet152, 60_192_808),
        (Model::DenseNet121, 7_978_856),
        (Model::DenseNet169, 14_149_480),
        (Model::DenseNet201, 20_013_928),
        (Model::InceptionV3, 27_161_264),
        (Model::GoogleNet, 13_004_888),
        (Model::BertBase, 109_482_240),
        (Model::BertLarge, 335_141_888),
        (Model::Gpt2, 124_439_808),
        // torch's nn.Transformer() has 44,140,544; "Attention is all you need" says 65 million
        // with its vocabulary.
        (Model::Transformer, 44_140_544 + 37_000 * 512),
        (Model::Ugatit, 670_761_088),
    ];
    assert_eq!(published.map(|(model, _)| model), Model::ALL);
    for (model, count) in published {
        assert_eq!(parameters(model, true), count, "{}", model.name());
    }
    assert_eq!(parameters(Model::InceptionV3, false), 23_834_568);
    assert_eq!(parameters(Model::GoogleNet, false), 6_624_904);
}

#[test]
fn multiply_adds_are_those_that_torchvision_publishes() {
    // GFLOPS of its tables, which count a multiply-add as one.
    let published = [
        (Model::AlexNet, 0.714),
        (Model::Vgg11, 7.609),
        (Model::Vgg16, 15.47),
        (Model::Vgg19, 19.632),
        (Model::ResNet18, 1.814),
        (Model::ResNet34, 3.664),
        (Model::ResNet50, 4.089),
        (Model::ResNet101, 7.801),
        (Model::ResNet152, 11.514),
        (Model::DenseNet121, 2.834),
        (Model::DenseNet169, 3.36),
        (Model::DenseNet201, 4.291),
        (Model::InceptionV3, 5.713),
        (Model::GoogleNet, 1.498),
    ];
    for (model, giga) in published {
        let layers = model.layers();
        let sum: u64 = layers.iter().filter(|layer| !layer.auxiliary).map(|layer| layer.multiply_adds).sum();
        let ours = sum as f64 / 1e9;
        assert!((ours / giga - 1.0).abs() < 0.005, "{}: {ours} beside {giga}", model.name());
    }
}

#[test]
fn backward_takes_twice_as_long_as_forward() {
    let layer = Layer { parameters: 1, multiply_adds: 1_000_000, auxiliary: false, vectors: (0, 0) };
    assert_eq!(layer.forward(32, 1e12), Duration::from_micros(64));
    assert_eq!(layer.backward(32, 1e12), Duration::from_micros(128));
}
