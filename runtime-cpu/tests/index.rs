//! Gather and scatter against host loops.

mod common;

use common::*;
use numcore::{
    DType, ErrorKind, Tensor, TensorMut,
    ops::{Apply, IndexOps, Op, PointwiseOps, ViewOps},
};
use runtime_cpu::Cpu;

/// Axes of `shape` before, at and after `axis`, as sizes of three.
fn split(shape: &[usize], axis: usize) -> [usize; 3] {
    [shape[..axis].iter().product(), shape[axis], shape[axis + 1..].iter().product()]
}

/// Calls `f` with (element of near, element of far) for every element of an index of `near`'s shape.
fn each(near: &[usize], far: usize, axis: usize, index: &[f64], mut f: impl FnMut(usize, usize)) {
    let [before, along, after] = split(near, axis);
    for (n, &i) in index.iter().enumerate().take(before * along * after) {
        let (b, a) = (n / (along * after), n % after);
        f(n, (b * far + i as usize) * after + a);
    }
}

fn indices(cpu: &Cpu, shape: &[usize], below: usize, seed: u64) -> Vec<Known> {
    let n = shape.iter().product();
    let values: Vec<f64> = draw(DType::U32, n, seed).iter().map(|x| x % below as f64).collect();
    let (dense, values) = store(cpu, DType::I64, shape, &values);
    let turned = dense.transpose(0, -1).unwrap().copy().unwrap().transpose(0, -1).unwrap();
    vec![
        Known { tensor: dense, values: values.clone(), what: "dense index".into() },
        Known { tensor: turned, values, what: "turned index".into() },
    ]
}

#[test]
fn gather_along_every_axis() {
    let cpu = Cpu::with_threads(2);
    for dtype in [DType::F32, DType::F16, DType::I64, DType::Bool] {
        for shape in [&[9][..], &[6, 50], &[3, 4, 70], &[2, 3, 4, 5]] {
            for axis in 0..shape.len() {
                let mut near = shape.to_vec();
                near[axis] = 11;
                for x in views(&cpu, dtype, shape, 1) {
                    for index in indices(&cpu, &near, shape[axis], 2) {
                        let mut expected = vec![0.0; near.iter().product()];
                        each(&near, shape[axis], axis, &index.values, |n, f| expected[n] = x.values[f]);
                        let got = x.tensor.gather(axis as isize, &index.tensor).unwrap();
                        close(&got, &expected, 0.0, &format!("axis {axis} of {}, {}", x.what, index.what));
                    }
                }
            }
        }
    }
}

#[test]
fn rows_by_one_index() {
    let cpu = Cpu::with_threads(2);
    let ids = [3i64, 0, 3, 6, 1, 1, 5];
    let index = Tensor::from_vec(&cpu, ids.to_vec()).unwrap();
    for dtype in [DType::F32, DType::BF16] {
        for width in [1, 5, 300, 1000] {
            for table in views(&cpu, dtype, &[7, width], 3) {
                let picked: Vec<f64> =
                    ids.iter().flat_map(|&i| table.values[i as usize * width..][..width].to_vec()).collect();
                close(&table.tensor.embedding(&index).unwrap(), &picked, 0.0, &table.what);
                let columns = table.tensor.t().unwrap().index_select(1, &index).unwrap();
                close(&columns.t().unwrap(), &picked, 0.0, &table.what);
            }
        }
    }
}

#[test]
fn scatter_add_along_every_axis() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS.into_iter().chain([DType::I64]) {
        for shape in [&[9][..], &[6, 50], &[3, 4, 70], &[40, 300]] {
            for axis in 0..shape.len() {
                let mut near = shape.to_vec();
                near[axis] = 13;
                for src in views(&cpu, dtype, &near, 4).into_iter().take(4) {
                    for index in indices(&cpu, &near, shape[axis], 5) {
                        let zeros = Tensor::zeros(&cpu, shape, dtype).unwrap();
                        let mut expected = vec![0.0; shape.iter().product()];
                        each(&near, shape[axis], axis, &index.values, |n, f| expected[f] += src.values[n]);
                        let got = zeros.scatter_add(axis as isize, &index.tensor, &src.tensor).unwrap();
                        let tolerance = if dtype == DType::I64 { 0.0 } else { 8.0 * tolerance(dtype) };
                        close(&got, &expected, tolerance, &format!("axis {axis} of {}, {}", src.what, index.what));
                    }
                }
            }
        }
    }
}

#[test]
fn halves_are_rounded_once() {
    let cpu = Cpu::with_threads(2);
    let many = Tensor::full(&cpu, [3000, 4], DType::BF16, 1.0).unwrap();
    let zeros = Tensor::zeros(&cpu, [2, 4], DType::BF16).unwrap();
    let sum = zeros.index_add(0, &Tensor::zeros(&cpu, [3000], DType::I64).unwrap(), &many).unwrap();
    assert_eq!(sum.to_f64s().unwrap(), [3008.0, 3008.0, 3008.0, 3008.0, 0.0, 0.0, 0.0, 0.0]);
}

#[test]
fn gathers_may_be_added() {
    let cpu = Cpu::with_threads(2);
    for dtype in FLOATS {
        let x = &views(&cpu, dtype, &[7, 60], 6)[0];
        let index = Tensor::from_vec(&cpu, vec![6i64, 2, 2]).unwrap();
        let picked = x.tensor.index_select(0, &index).unwrap();
        let twice = picked.add(&picked).unwrap().to_f64s().unwrap();
        let wide = index.reshape([3, 1]).unwrap().broadcast_to([3, 60]).unwrap();
        let gather = gather_op(0, &x.tensor, &wide);
        let mut out = TensorMut::alloc(&cpu, [3, 60].into(), dtype).unwrap();
        for _ in 0..2 {
            out.accumulate(&gather, &[&x.tensor, &wide]).unwrap();
        }
        close(&out.freeze().unwrap(), &twice, 0.0, "twice");
    }
}

/// The gather op, captured by a custom `Apply`: a gradient rule is the only other place that creates one.
fn gather_op(axis: isize, x: &T, index: &T) -> Op {
    thread_local!(static SEEN: std::cell::RefCell<Option<Op>> = const { std::cell::RefCell::new(None) });
    #[derive(Clone)]
    struct Spy(T);
    impl Apply for Spy {
        type Runtime = Cpu;
        fn runtime(&self) -> &Cpu {
            self.0.runtime()
        }
        fn spec(&self) -> numcore::ops::Spec {
            self.0.spec()
        }
        fn constant(value: T) -> Self {
            Spy(value)
        }
        fn detach(&self) -> Self {
            self.clone()
        }
        fn apply(op: Op, ins: &[&Self]) -> numcore::Result<numcore::ops::Outs<Self>> {
            SEEN.set(Some(op.clone()));
            let outs = T::apply(op, &ins.iter().map(|s| &s.0).collect::<Vec<_>>())?;
            Ok(outs.into_iter().map(Spy).collect())
        }
    }
    Spy(x.clone()).gather(axis, &Spy(index.clone())).unwrap();
    SEEN.take().unwrap()
}

#[test]
fn an_index_out_of_range_is_an_error_that_names_it() {
    let cpu = Cpu::with_threads(2);
    let x = Tensor::ones(&cpu, [4, 3], DType::F32).unwrap();
    for (bad, at) in [(4i64, 1), (-1, 0), (i64::MAX, 2), (i64::MIN, 2)] {
        let mut ids = vec![0i64; 3];
        ids[at] = bad;
        let index = Tensor::from_vec(&cpu, ids).unwrap();
        for e in
            [x.index_select(0, &index).unwrap_err(), x.index_add(0, &index, &x.narrow(0, 0, 3).unwrap()).unwrap_err()]
        {
            assert!(matches!(e.kind(), ErrorKind::Index { size: 4, .. }));
            let text = e.to_string();
            assert!(text.contains(&format!("index {bad} at position [{at}, 0]")) && text.contains("0..4"), "{text}");
        }
    }
    let none = Tensor::from_vec(&cpu, Vec::<i64>::new()).unwrap();
    assert_eq!(x.index_select(0, &none).unwrap().dims(), [0, 3]);
    let empty = Tensor::ones(&cpu, [0, 3], DType::F32).unwrap();
    assert!(empty.index_select(0, &Tensor::from_vec(&cpu, vec![0i64]).unwrap()).is_err());
}

/// The position of an index out of range is reported in terms of the caller's tensor, not of its reshaped form.
#[test]
fn errors_of_embedding_and_one_hot_name_the_position_given() {
    let cpu = Cpu::with_threads(2);
    let table = Tensor::ones(&cpu, [4, 3], DType::F32).unwrap();
    let ids = Tensor::from_slice(&cpu, [2, 5], &[0i64, 1, 2, 3, 0, 1, 2, 77, 0, 1]).unwrap();
    let says = |error: numcore::Error, start: &str| {
        let text = error.to_string();
        assert!(text.starts_with(start) && text.contains("runtime-cpu/tests/index.rs"), "{text}");
    };
    let error = table.embedding(&ids).unwrap_err();
    says(error, "embedding: index 77 at position [1, 2] of the index [2, 5] is not in 0..4");
    let error = ids.one_hot(4).unwrap_err();
    says(error, "one_hot: index 77 at position [1, 2] of the index [2, 5] is not in 0..4");
    let error = ids.narrow(1, 0, 2).unwrap().one_hot(1).unwrap_err();
    says(error, "one_hot: index 1 at position [0, 1] of the index [2, 2] is not in 0..1");
    let hot = ids.narrow(0, 0, 1).unwrap().one_hot(4).unwrap();
    assert_eq!(hot.dims(), [1, 5, 4]);
    assert_eq!(hot.to_vec::<i64>().unwrap(), [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0]);
    assert_eq!(ids.narrow(1, 0, 0).unwrap().one_hot(4).unwrap().dims(), [2, 0, 4]);
}

/// No integer is converted to `f64` when it is read.
#[test]
fn integers_are_shown_and_read_exactly() {
    let cpu = Cpu::with_threads(1);
    let one = |x: i64| Tensor::from_slice(&cpu, [], &[x]).unwrap();
    assert_eq!(one(i64::MAX).item_as::<i64>().unwrap(), i64::MAX);
    assert_eq!(one((1 << 53) + 1).item_as::<i64>().unwrap(), (1 << 53) + 1);
    assert!(one(i64::MAX).to_string().starts_with("9223372036854775807\n"), "{}", one(i64::MAX));
    assert!(one(i64::MIN + 1).to_string().starts_with("-9223372036854775807\n"));
    let error = one(1).item_as::<f32>().unwrap_err().to_string();
    assert!(error.contains("item_as") && error.contains("i64"), "{error}");
    assert!(Tensor::ones(&cpu, [2], DType::I64).unwrap().item_as::<i64>().is_err());
}
