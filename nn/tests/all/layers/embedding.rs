//! Tables of rows: padding, frozen rows, a table that is the head as well.

use autograd::Var;
use nn::*;
use numcore::{Tensor, ops::ReduceOps};

use super::{init, message, same};
use crate::common::{cpu, f64s};

#[test]
fn the_padding_row_stays_zero() {
    let table = Embedding::new(&init(), 4, 3).unwrap().with_padding_idx(2).unwrap();
    let indices = Var::new(Tensor::from_slice(&cpu(), [2, 2], &[0i64, 2, 2, 3]).unwrap());
    let rows = table.forward(&indices).unwrap();
    assert_eq!(rows.dims(), [2, 2, 3]);
    assert!(f64s(&rows)[3..9].iter().all(|&x| x == 0.0), "padding is 0");
    let gradients = rows.sum_all().unwrap().backward().unwrap();
    let grad = gradients.get(&table.weight.leaf()).unwrap().to_f64s().unwrap();
    assert_eq!(grad, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
}

/// A row that is frozen gets no gradient and keeps its value.
#[test]
fn a_frozen_row_keeps_its_value() {
    let table = Embedding::new(&init(), 4, 2).unwrap();
    let before = table.weight.value().unwrap();
    let table = table.with_frozen_row(2).unwrap();
    same(&Var::new(table.weight.value().unwrap()), &Var::new(before));
    let indices = Var::new(Tensor::from_slice(&cpu(), [3], &[2i64, 1, 2]).unwrap());
    let loss = table.forward(&indices).unwrap().sum_all().unwrap();
    let grads = loss.backward().unwrap();
    assert_eq!(grads.get(&table.weight.leaf()).unwrap().to_f64s().unwrap(), [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]);
    assert!(
        message(Embedding::new(&init(), 4, 2).unwrap().with_frozen_row(4))
            .contains("padding index is 4, and must be in 0..4")
    );
}

#[test]
fn a_tied_head_is_the_token_table() {
    let config =
        GptConfig { vocab: 7, context: 4, layers: 1, heads: 2, width: 4, tied_head: true, ..Default::default() };
    let gpt = Gpt::new(&init(), config).unwrap();
    assert!(gpt.named_parameters().iter().all(|(n, _)| !n.starts_with("head")));
    let tokens = Var::new(Tensor::from_slice(&cpu(), [1, 3], &[1i64, 2, 6]).unwrap());
    let logits = gpt.forward(&tokens).unwrap();
    assert_eq!(logits.dims(), [1, 3, 7]);
    let loss = loss::cross_entropy(&logits, &tokens).unwrap();
    let gradients = loss.backward().unwrap();
    gradients.require(&gpt.parameters().iter().map(Param::leaf).collect::<Vec<_>>()).unwrap();
}
