//! Augmentations: torchvision's values, distributions of what is drawn, and equal pixels at any number of ranks.

use std::sync::Arc;

use data::{
    Array, Dataset, InMemory, Loader, Rows,
    mix::{cutmix, mixup},
    random::{beta, keyed},
};

#[test]
fn draws_from_beta_have_its_moments() {
    for (a, b) in [(0.2, 0.2), (1.0, 1.0), (3.0, 3.0), (0.5, 2.5)] {
        let mut rng = keyed(1, 0, 0);
        let draws: Vec<f64> = (0..20_000).map(|_| beta(a, b, &mut rng).unwrap()).collect();
        assert!(draws.iter().all(|x| (0.0..=1.0).contains(x)));
        let mean = draws.iter().sum::<f64>() / 20_000.0;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / 20_000.0;
        let due = a * b / ((a + b) * (a + b) * (a + b + 1.0));
        assert!((mean - a / (a + b)).abs() < 0.01 && (variance - due).abs() < 0.005, "{a} {b}: {mean} {variance}");
    }
    // The variates are 0; their ratio is not.
    let mut rng = keyed(1, 0, 1);
    assert!((0..1000).all(|_| (0.0..=1.0).contains(&beta(1e-4, 1e-4, &mut rng).unwrap())));
    for shape in [0.0, -1.0, 1e-310, f64::INFINITY, f64::NAN] {
        let error = beta(1.0, shape, &mut rng).unwrap_err().to_string();
        assert!(error.contains("parameter"), "{error}");
    }
}

#[test]
fn mixtures_are_weighted_sums() {
    let [a, b] = [0.0, 100.0].map(|from| Array::new([2, 3], (0..6).map(|i| from + i as f32).collect()).unwrap());
    let mut weights = Vec::new();
    for example in 0..500 {
        let (mixed, weight) = mixup(&a, &b, 0.5, &mut keyed(3, 0, example)).unwrap();
        for (i, x) in mixed.to_vec::<f32>().unwrap().into_iter().enumerate() {
            assert!((x - (i as f32 + 100.0 * (1.0 - weight))).abs() < 1e-4);
        }
        weights.push(weight);
    }
    assert!(weights.iter().any(|&w| w < 0.2) && weights.iter().any(|&w| w > 0.8));
    let mut rng = keyed(3, 0, 0);
    let says = |result: numcore::Result<(Array, f32)>, words: &str| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(error.location().map(|at| at.file()), Some(file!()), "{error}");
    };
    says(mixup(&a, &b.clone().reshape([6]).unwrap(), 0.5, &mut rng), "both must be of one shape and type");
    says(mixup(&a, &b, 0.0, &mut rng), "alpha is 0");
    says(mixup(&a, &b, f64::NAN, &mut rng), "alpha is NaN");
    let whole = Array::new([2, 3], vec![0i64; 6]).unwrap();
    says(mixup(&whole, &whole, 0.5, &mut rng), "f32 were asked for");
    let flat = Array::from_vec(vec![0.0f32; 6]);
    says(cutmix(&flat, &flat, 1.0, &mut rng), "need the axes height and width");
}

#[test]
fn cut_rectangles_are_of_the_other_image() {
    for dims in [[2, 5, 7], [1, 1, 1], [3, 0, 4], [3, 4, 0], [0, 4, 4]] {
        let count: usize = dims.iter().product();
        let [a, b] = [0u8, 1].map(|x| Array::new(dims, vec![x; count]).unwrap());
        let mut weights = Vec::new();
        for example in 0..400 {
            let (mixed, weight) = cutmix(&a, &b, 1.0, &mut keyed(3, 0, example)).unwrap();
            let values = mixed.to_vec::<u8>().unwrap();
            let left = values.iter().filter(|&&x| x == 0).count();
            assert!(count == 0 || (left as f32 / count as f32 - weight).abs() < 1e-6, "{dims:?}");
            if let [channels, height, width] = dims
                && count > 0
            {
                // One rectangle, the same in every channel.
                let cut = |y: usize, x: usize| values[y * width + x] == 1;
                let rows = (0..height).filter(|&y| (0..width).any(|x| cut(y, x))).count();
                let columns = (0..width).filter(|&x| (0..height).any(|y| cut(y, x))).count();
                assert_eq!(rows * columns * channels, count - left);
            }
            weights.push(weight);
        }
        assert!(count < 10 || weights.contains(&1.0) && weights.iter().any(|&w| w < 0.4));
    }
}

#[test]
fn mixtures_are_keyed_by_example() {
    let images = Rows::new(Array::new([13, 1, 2, 2], (0..52).map(|i| i as f32).collect()).unwrap()).unwrap();
    let examples = Arc::new(images.zip(InMemory::new((0..13).collect::<Vec<i64>>())).unwrap());
    let mixed = |workers: usize, ranks: usize| {
        let one = |rank| {
            let loader = Loader::new(Arc::clone(&examples)).batch(5).shuffle(1).workers(workers).rank(rank, ranks);
            let others = Arc::clone(&examples);
            let loader = loader.augment(5, move |(x, class), rng| {
                let (other, other_class) = others.get(rng.below(others.len() as u64) as usize)?;
                let (x, weight) = cutmix(&x, &other, 1.0, rng)?;
                let (x, share) = mixup(&x, &other, 0.2, rng)?;
                let bits: Vec<u32> = x.to_vec::<f32>()?.into_iter().map(f32::to_bits).collect();
                Ok((class, other_class, (weight * share).to_bits(), bits))
            });
            loader.epoch(1).unwrap().flat_map(|batch| {
                let batch = batch.unwrap();
                batch.data.into_iter().take(batch.count).collect::<Vec<_>>()
            })
        };
        let mut all: Vec<_> = (0..ranks).flat_map(one).collect();
        all.sort_unstable();
        all
    };
    let alone = mixed(0, 1);
    assert_eq!(alone.len(), 13);
    for (workers, ranks) in [(3, 1), (1, 2), (2, 3), (0, 8)] {
        assert_eq!(mixed(workers, ranks), alone, "{workers} workers, {ranks} ranks");
    }
}

#[cfg(feature = "image")]
mod images {
    use data::{
        random::keyed,
        sources::image::{ColorJitter, Image, RandAugment},
    };
    use serde_json::Value;

    fn bytes(list: &Value) -> Vec<u8> {
        list.as_array().unwrap().iter().map(|x| x.as_u64().unwrap() as u8).collect()
    }

    #[test]
    fn changes_have_torchvision_s_values() {
        let reference: Value = serde_json::from_str(include_str!("../references/augment.json")).unwrap();
        let [width, height] = ["width", "height"].map(|side| reference[side].as_u64().unwrap() as u32);
        let pixels = bytes(&reference["pixels"]);
        let image = Image::new(width, height, pixels.clone()).unwrap();
        let small = Image::new(width, height, pixels.iter().map(|x| x / 2 + 20).collect()).unwrap();
        // The image four times along both sides.
        let place = |i: u32| (i / 3 % (4 * width) % width + i / (12 * width) % height * width) * 3 + i % 3;
        let tiled = (0..48 * width * height).map(|i| pixels[place(i) as usize]).collect();
        let tiled = Image::new(4 * width, 4 * height, tiled).unwrap();
        let (w, h) = (f64::from(width) / 2.0, f64::from(height) / 2.0);
        let mut tried = 0;
        for (op, cases) in reference["ops"].as_object().unwrap() {
            for (x, due) in cases.as_object().unwrap() {
                let x: f64 = x.parse().unwrap();
                let found = match &**op {
                    "brightness" => image.brightness(x as f32),
                    "contrast" => image.contrast(x as f32),
                    "saturation" => image.saturation(x as f32),
                    "hue" => image.hue(x as f32),
                    "sharpness" => image.sharpness(x as f32),
                    "posterize" => image.posterize(x as u32),
                    "solarize" => image.solarize(x as f32),
                    "auto_contrast" => small.auto_contrast(),
                    "equalize" => tiled.equalize().crop(0, 0, width, height).unwrap(),
                    "rotate" => image.rotated(x, [0; 3]),
                    "shear_x" => image.affine([1.0, x, x * h, 0.0, 1.0, 0.0], [0; 3]),
                    "shear_y" => image.affine([1.0, 0.0, 0.0, x, 1.0, x * w], [0; 3]),
                    "translate" => image.affine([1.0, 0.0, -x, 0.0, 1.0, 1.0], [0; 3]),
                    other => panic!("{other}"),
                };
                let mut due = bytes(due);
                if op == "sharpness" {
                    // torchvision blends the border with itself, and rounds some values down by one.
                    for (i, due) in due.iter_mut().enumerate() {
                        let (column, row) = (i as u32 / 3 % width, i as u32 / 3 / width);
                        if column % (width - 1) == 0 || row % (height - 1) == 0 {
                            assert!(pixels[i] - *due <= 1, "{op} {x}");
                            *due = pixels[i];
                        }
                    }
                }
                assert_eq!(found.bytes(), due, "{op} {x}");
                tried += 1;
            }
        }
        assert_eq!(tried, 32);
    }

    #[test]
    fn borders_and_mirrors() {
        let image = Image::new(2, 2, (0..12).collect()).unwrap();
        let padded = image.padded(1, [7, 8, 9]).unwrap();
        assert_eq!((padded.size(), &padded.bytes()[..3]), ((4, 4), &[7, 8, 9][..]));
        assert_eq!(padded.crop(1, 1, 2, 2).unwrap(), image);
        assert!(image.padded(u32::MAX / 2, [0; 3]).unwrap_err().to_string().contains("border is"));
        assert!(image.padded(1 << 30, [0; 3]).is_err());
        assert_eq!(image.flipped_vertically().bytes(), [6, 7, 8, 9, 10, 11, 0, 1, 2, 3, 4, 5]);
    }

    #[test]
    fn a_rectangle_is_erased() {
        let image = Image::new(20, 16, vec![1; 960]).unwrap();
        let (mut erased, mut places) = (0, std::collections::BTreeSet::new());
        for example in 0..400 {
            let found = image.clone().random_erased(0.5, [9, 8, 7], &mut keyed(1, 0, example));
            let gone: Vec<usize> = (0..320).filter(|i| found.bytes()[3 * i..3 * i + 3] == [9, 8, 7]).collect();
            if let (Some(first), Some(last)) = (gone.first(), gone.last()) {
                let (w, h) = (last % 20 - first % 20 + 1, last / 20 - first / 20 + 1);
                assert_eq!(w * h, gone.len(), "a rectangle");
                let part = gone.len() as f64 / 320.0;
                assert!((0.01..0.37).contains(&part), "{part}");
                places.insert(*first);
                erased += 1;
            }
        }
        assert!((150..250).contains(&erased) && places.len() > 50, "{erased} {}", places.len());
        assert_eq!(image.clone().random_erased(0.0, [9; 3], &mut keyed(1, 0, 0)), image);
    }

    #[test]
    fn jitter_stays_in_its_ranges() {
        let grey = Image::new(1, 1, vec![100; 3]).unwrap();
        let jitter = ColorJitter { brightness: 0.4, ..Default::default() };
        let all: Vec<u8> = (0..300).map(|i| jitter.apply(&grey, &mut keyed(1, 0, i)).unwrap().bytes()[0]).collect();
        assert!(
            all.iter().all(|x| (59..=140).contains(x)) && all.iter().any(|&x| x < 70) && all.iter().any(|&x| x > 130)
        );
        // From 0 on where the range is above 1, and evenly: half of the factors of 0 to 3 are above 1.5.
        let wide = ColorJitter { brightness: 2.0, ..Default::default() };
        let dim: Vec<u8> = (0..300).map(|i| wide.apply(&grey, &mut keyed(1, 0, i)).unwrap().bytes()[0]).collect();
        let share = |most: u8| dim.iter().filter(|&&x| x <= most).count();
        assert!(share(0) < 10 && (120..180).contains(&share(150)), "{} {}", share(0), share(150));
        let color = Image::new(2, 1, vec![200, 40, 90, 30, 120, 60]).unwrap();
        let all = ColorJitter { brightness: 0.4, contrast: 0.4, saturation: 2.0, hue: 0.5 };
        let mut seen: Vec<Vec<u8>> =
            (0..100).map(|i| all.apply(&color, &mut keyed(1, 0, i)).unwrap().bytes().to_vec()).collect();
        assert_eq!(seen[7], all.apply(&color, &mut keyed(1, 0, 7)).unwrap().bytes());
        seen.sort_unstable();
        seen.dedup();
        assert!(seen.len() > 95);
        assert_eq!(ColorJitter::default().apply(&color, &mut keyed(1, 0, 0)).unwrap(), color);
        for (jitter, due) in [
            (ColorJitter { contrast: -0.1, ..all }, "range is -0.1"),
            (ColorJitter { saturation: f32::NAN, ..all }, "range is NaN"),
            (ColorJitter { hue: 0.6, ..all }, "hue is 0.6"),
        ] {
            let error = jitter.apply(&color, &mut keyed(1, 0, 0)).unwrap_err().to_string();
            assert!(error.contains(due), "{error}");
        }
    }

    #[test]
    fn rand_augment_changes_images_of_every_size() {
        let image = Image::new(16, 16, (0..768).map(|i| (i * 37 % 251) as u8).collect()).unwrap();
        let one = RandAugment { changes: 1, magnitude: 30, ..Default::default() };
        let mut seen: Vec<Vec<u8>> =
            (0..400).map(|i| one.apply(&image, &mut keyed(1, 0, i)).unwrap().bytes().to_vec()).collect();
        seen.sort_unstable();
        seen.dedup();
        // Of fourteen changes, nine have a sign; the image itself is one.
        assert_eq!(seen.len(), 9 * 2 + 5);
        assert!(seen.contains(&image.bytes().to_vec()) && seen.contains(&image.posterize(4).bytes().to_vec()));
        assert!(seen.contains(&image.rotated(-30.0, [0; 3]).bytes().to_vec()));
        assert!(seen.contains(&image.affine([1.0, 0.0, -7.0, 0.0, 1.0, 0.0], [0; 3]).bytes().to_vec()));
        assert!(seen.contains(&image.brightness(1.9).bytes().to_vec()));
        for (width, height) in [(1, 1), (0, 0), (2, 1), (1, 3)] {
            let image = Image::new(width, height, vec![9; 3 * (width * height) as usize]).unwrap();
            for i in 0..100 {
                let found = RandAugment::default().apply(&image, &mut keyed(1, 0, i)).unwrap();
                assert_eq!(found.random_erased(1.0, [0; 3], &mut keyed(1, 0, i)).size(), (width, height));
            }
        }
        let error = RandAugment { magnitude: 31, ..one }.apply(&image, &mut keyed(1, 0, 0)).unwrap_err();
        assert!(error.to_string().contains("magnitude is 31"));
    }
}
