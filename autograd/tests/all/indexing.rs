//! Indexing as in Python, and gradients through it.

use crate::common::{cpu, grad_of, leaf, values};
use autograd::{Var, backward};
use numcore::{
    DType, Tensor,
    ops::{AxisRange, Ellipsis, IndexingOps, NewAxis, PointwiseOps, ReduceOps, ViewOps},
};

fn counted(shape: &[usize]) -> Tensor<runtime_cpu::Cpu> {
    let n: usize = shape.iter().product();
    Tensor::arange(&cpu(), 0.0, 1.0, n, DType::F32).unwrap().reshape(shape).unwrap()
}

#[test]
fn parts_are_python_s() {
    let x = counted(&[3, 4, 2]);
    let is = |part: numcore::Result<Tensor<_>>, dims: &[usize], values: &[f64]| {
        let part = part.unwrap();
        assert_eq!((part.dims(), &part.to_f64s().unwrap()[..]), (dims, values));
    };
    is(x.i((1, 2, 1)), &[], &[13.0]);
    is(x.i((-1, -1)), &[2], &[22.0, 23.0]);
    is(x.i((0, 1..3)), &[2, 2], &[2.0, 3.0, 4.0, 5.0]);
    is(x.i((.., 1..=1, 0)), &[3, 1], &[2.0, 10.0, 18.0]);
    is(x.i((2, -2.., 1)), &[2], &[21.0, 23.0]);
    is(x.i((Ellipsis, 0)).and_then(|p| p.i(0)), &[4], &[0.0, 2.0, 4.0, 6.0]);
    is(x.i((0, AxisRange::from(..).step(3), 0)), &[2], &[0.0, 6.0]);
    is(x.i((0, AxisRange::from(1..4).step(2), 0)), &[2], &[2.0, 6.0]);
    is(x.i((NewAxis, 0, 0, .., NewAxis)), &[1, 2, 1], &[0.0, 1.0]);
    is(x.i((0, 2..2)), &[0, 2], &[]);
    let last_first = Tensor::from_slice(&cpu(), [2], &[2i64, 0]).unwrap();
    is(x.i((&last_first, 0, 0)), &[2], &[16.0, 0.0]);
    // What is named whole is the tensor itself.
    assert!(x.i(..).unwrap().shares_memory_with(&x) && x.i((0usize, 1..4)).unwrap().shares_memory_with(&x));
}

#[test]
fn what_is_outside_is_an_error() {
    let x = counted(&[3, 4]);
    let says = |part: numcore::Result<Tensor<_>>, what: &str| {
        let error = part.map(drop).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    says(x.i(3), "axis 0 of size 3 has no position 3");
    says(x.i((0, -5)), "axis 1 of size 4 has no position -5");
    says(x.i((.., 2..5)), "axis 1 of size 4 has no range 2..5");
    says(x.i((.., -5..)), "no range -5..");
    says(x.i(usize::MAX), "no position");
    says(x.i(..=usize::MAX), "no range");
    #[allow(clippy::reversed_empty_ranges, reason = "what is tested")]
    {
        says(x.i(2..1), "no range 2..1");
    }
    says(x.i(AxisRange::from(..).step(0)), "no range .. by 0");
    says(x.i((0, 0, 0)), "an index of 3 entries for 2 axes");
    says(x.i((Ellipsis, 0, Ellipsis)), "one `Ellipsis`");
    says(x.i(&x), "index_select");
    let positions = Tensor::from_slice(&cpu(), [1], &[0i64]).unwrap();
    says(x.i((&positions, &positions)), "one tensor of positions");
}

#[test]
fn gradients_go_back_to_their_places() {
    let x = leaf(&cpu(), "x", [2, 3], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let part = x.i((.., -2..)).unwrap();
    assert_eq!(values(&part), [2.0, 3.0, 5.0, 6.0]);
    let loss: Var<_> = part.square().unwrap().sum_all().unwrap().add(&x.i((0, 0)).unwrap()).unwrap();
    assert_eq!(grad_of(&backward(&loss).unwrap(), &x), [1.0, 4.0, 6.0, 0.0, 10.0, 12.0]);
}
