//! Products with a matrix of four bits, against their decomposition.

use numcore::{
    DType, Tensor,
    fused::{Fused, Linear4bit, NestedScales},
    ops::{Apply, PointwiseOps},
    placement::TensorPlacement,
};
use runtime_cpu::Cpu;

fn numbers(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2).wrapping_add(1);
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..count).map(next).collect()
}

fn bytes(count: usize, seed: u64) -> Vec<u8> {
    numbers(count, seed).into_iter().map(|x| ((x + 1.0) * 127.9) as u8).collect()
}

/// The operands after the input: random words and scales.
fn stored(cpu: &Cpu, op: &Linear4bit) -> Vec<Tensor<Cpu>> {
    let elements = op.shape[0] * op.shape[1];
    let blocks = elements.div_ceil(op.block);
    let list = |values: Vec<f32>| Tensor::from_slice(cpu, [values.len()], &values).unwrap();
    let packed = Tensor::from_slice(cpu, [elements.div_ceil(2), 1], &bytes(elements.div_ceil(2), 1)).unwrap();
    let mut all = vec![packed, list(numbers(16, 2))];
    match op.nested {
        None => all.push(list(numbers(blocks, 3))),
        Some(nested) => {
            all.push(Tensor::from_slice(cpu, [blocks], &bytes(blocks, 4)).unwrap());
            all.extend([list(numbers(blocks.div_ceil(nested.block), 5)), list(numbers(256, 6))]);
        }
    }
    all
}

#[track_caller]
fn check(cpu: &Cpu, op: &Linear4bit, rows: &[usize], dtype: DType) {
    let stored = stored(cpu, op);
    let inputs = op.shape[usize::from(!op.transposed)];
    let shape = [rows, &[inputs]].concat();
    let x = Tensor::from_slice(cpu, &shape, &numbers(shape.iter().product(), 7)).unwrap().to_dtype(dtype).unwrap();
    let ins: Vec<&Tensor<Cpu>> = [&x].into_iter().chain(&stored).collect();
    let got = Tensor::apply1(op.clone(), &ins).unwrap();
    let wide: Vec<Tensor<Cpu>> = [x.to_dtype(DType::F64).unwrap()].into_iter().chain(stored.clone()).collect();
    let due = op.decompose(&wide.iter().collect::<Vec<_>>()).unwrap().remove(0);
    assert_eq!((got.dtype(), got.shape()), (dtype, due.shape()));
    // The sum of the magnitudes of all products bounds what rounding may do.
    let tolerance = if dtype == DType::F32 { 1e-6 } else { dtype.epsilon() };
    let bound = 0.3 * inputs as f64 + 1.0;
    for (g, d) in got.to_f64s().unwrap().iter().zip(due.to_f64s().unwrap()) {
        assert!((g - d).abs() <= tolerance * bound.max(d.abs()), "{op:?} {rows:?} {dtype}: {g}, due {d}");
    }
}

fn op(shape: [usize; 2], block: usize) -> Linear4bit {
    Linear4bit { shape, block, nested: None, transposed: false }
}

#[test]
fn every_form_computes_what_its_decomposition_does() {
    let cpu = Cpu::with_threads(2);
    let nested = Some(NestedScales { block: 5, offset: 0.25 });
    // One and several rows; blocks within rows, across rows and odd; a last block that is not whole; more than one tile either way.
    for (shape, block) in
        [([40, 64], 64), ([7, 33], 32), ([3, 5], 4), ([300, 96], 64), ([130, 1300], 64), ([1100, 37], 16)]
    {
        for transposed in [false, true] {
            let op = Linear4bit { transposed, ..op(shape, block) };
            for rows in [&[1][..], &[9], &[2, 3], &[]] {
                check(&cpu, &op, rows, DType::F32);
            }
            check(&cpu, &Linear4bit { nested, ..op.clone() }, &[5], DType::F32);
            check(&cpu, &Linear4bit { nested, ..op.clone() }, &[3], DType::BF16);
            check(&cpu, &op, &[3], DType::F16);
            check(&cpu, &op, &[2], DType::F64);
        }
    }
}

#[test]
fn nothing_and_no_rows() {
    let cpu = Cpu::with_threads(1);
    for (shape, rows) in [([4, 8], 0), ([0, 8], 3), ([4, 0], 2), ([0, 0], 1)] {
        for transposed in [false, true] {
            check(&cpu, &Linear4bit { transposed, ..op(shape, 32) }, &[rows], DType::F32);
        }
    }
}

#[test]
fn bits_do_not_depend_on_threads() {
    let op = Linear4bit { nested: Some(NestedScales { block: 7, offset: 0.5 }), ..op([500, 1200], 64) };
    let bits = |threads| {
        let cpu = Cpu::with_threads(threads);
        let stored = stored(&cpu, &op);
        let x = Tensor::from_slice(&cpu, [3, 1200], &numbers(3600, 8)).unwrap();
        let ins: Vec<&Tensor<Cpu>> = [&x].into_iter().chain(&stored).collect();
        Tensor::apply1(op.clone(), &ins).unwrap().to_bytes().unwrap()
    };
    assert_eq!(bits(1), bits(3));
}

#[test]
fn operands_that_do_not_fit_are_errors() {
    let cpu = Cpu::with_threads(1);
    let op = op([4, 8], 32);
    let error = |op: &Linear4bit, x: &Tensor<Cpu>, stored: &[Tensor<Cpu>]| {
        let ins: Vec<&Tensor<Cpu>> = [x].into_iter().chain(stored).collect();
        Tensor::apply1(op.clone(), &ins).unwrap_err().to_string()
    };
    let (x, stored) = (Tensor::zeros(&cpu, [2, 8], DType::F32).unwrap(), stored(&cpu, &op));
    let narrow = Tensor::zeros(&cpu, [2, 7], DType::F32).unwrap();
    assert!(error(&op, &narrow, &stored).contains("[.., 8]"));
    assert!(error(&op, &x.to_dtype(DType::I64).unwrap(), &stored).contains("floating"));
    assert!(error(&Linear4bit { block: 0, ..op.clone() }, &x, &stored).contains("at least one"));
    assert!(error(&Linear4bit { block: 16, ..op.clone() }, &x, &stored).contains("2 scales"));
    let mut wrong = stored.clone();
    wrong[1] = wrong[2].clone();
    assert!(error(&op, &x, &wrong).contains("16 code words"));
    let mut wrong = stored;
    wrong[0] = wrong[0].to_dtype(DType::F32).unwrap();
    assert!(error(&op, &x, &wrong).contains("u8"));
}

/// Pieces are those of the decoded matrix, to the bit, also where a block spans two pieces.
#[test]
fn a_piece_keeps_its_elements() {
    let cpu = Cpu::with_threads(1);
    let nested = Some(NestedScales { block: 5, offset: 0.25 });
    // The shape and its block; the dimension, the parts of it and the pieces of a part; the block of a piece.
    let cuts = [
        ([6, 64], 64, (0, 3, 2), 64),
        ([8, 24], 64, (0, 1, 4), 8),
        ([6, 128], 64, (1, 1, 2), 64),
        ([6, 24], 64, (1, 1, 4), 2),
        ([3, 96], 32, (1, 1, 6), 16),
        ([3, 96], 64, (0, 1, 1), 32),
    ];
    for (shape, block, (dim, parts, of), own) in cuts {
        for nested in [None, nested] {
            let op = Linear4bit { nested, ..op(shape, block) };
            let stored = stored(&cpu, &op);
            let stored: Vec<&Tensor<Cpu>> = stored.iter().collect();
            for place in 0..of {
                let piece = TensorPlacement::part(shape.into(), dim, parts, place, of).unwrap();
                let (op_of_piece, parts) = op.piece(&stored, &piece).unwrap();
                assert_eq!((op_of_piece.block, op_of_piece.nested), (own, None));
                let got = op_of_piece.weight(&parts.iter().collect::<Vec<_>>()).unwrap();
                let due = piece.take(&op.weight(&stored).unwrap()).unwrap().contiguous().unwrap();
                assert_eq!((got.shape(), got.to_bytes().unwrap()), (due.shape(), due.to_bytes().unwrap()));
            }
        }
    }
    let op = op([2, 6], 32);
    let piece = TensorPlacement::part([2, 6].into(), 1, 1, 1, 2).unwrap();
    let error = op.piece(&stored(&cpu, &op).iter().collect::<Vec<_>>(), &piece).unwrap_err().to_string();
    assert!(error.contains("within a byte"), "{error}");
}
