//! Recurrent layers: states, directions, and their formulas.

use autograd::Var;
use nn::*;
use numcore::{
    DType, Tensor,
    ops::{PointwiseOps, ViewOps, cat},
};
use runtime_cpu::Cpu;

use super::{init, message, same, uniform};
use crate::common::{V, cpu, f64s};

/// Reading a sequence in two parts, with the state passed on, equals reading it at once; also with several layers.
#[test]
fn a_recurrent_layer_resumes_from_its_state() {
    fn check<C: RecurrentCell>(init: &Init<Cpu>) {
        let config = RecurrentConfig { layers: 2, ..RecurrentConfig::new(3, 4) };
        let layer = Recurrent::<Cpu, C>::new(init, config).unwrap();
        let x = uniform(&[2, 6, 3], 9);
        let whole = layer.run(&x, None).unwrap();
        let first = layer.run(&x.narrow(1, 0, 2).unwrap(), None).unwrap();
        let second = layer.run(&x.narrow(1, 2, 4).unwrap(), Some(&first.state)).unwrap();
        same(&whole.output, &cat(&[&first.output, &second.output], 1).unwrap());
        assert_eq!(whole.state.len(), C::STATES);
        whole.state.iter().zip(&second.state).for_each(|(a, b)| same(a, b));
        same(&whole.output.select(1, 5).unwrap(), &whole.state[0].select(0, 1).unwrap());
    }
    check::<RnnCell>(&init());
    check::<LstmCell>(&init());
    check::<GruCell>(&init());
    check::<GruResetFirstCell>(&init());
}

/// The formula of ONNX's `GRU` with `linear_before_reset = 0`, in loops.
#[test]
fn a_gru_that_resets_before_the_product() {
    let layer = GruResetFirst::new(&init(), RecurrentConfig::new(3, 4)).unwrap();
    let x = uniform(&[1, 3, 3], 5);
    let [w, u, b, c] = &layer.parameters().iter().map(|p| f64s(&p.var())).collect::<Vec<_>>()[..] else { panic!() };
    let values = f64s(&x);
    let mut h = [0.0; 4];
    for t in 0..3 {
        let part = |row: usize, by: &[f64; 4]| {
            let input: f64 = (0..3).map(|i| w[row * 3 + i] * values[t * 3 + i]).sum();
            input + b[row] + c[row] + (0..4).map(|j| u[row * 4 + j] * by[j]).sum::<f64>()
        };
        let gate = |row: usize| 1.0 / (1.0 + (-part(row, &h)).exp());
        let reset: [f64; 4] = std::array::from_fn(|k| gate(k) * h[k]);
        let next = std::array::from_fn(|k| {
            let z = gate(4 + k);
            (1.0 - z) * part(8 + k, &reset).tanh() + z * h[k]
        });
        h = next;
    }
    let got = f64s(&layer.run(&x, None).unwrap().state[0]);
    assert!(got.iter().zip(h).all(|(g, w)| (g - w).abs() < 1e-6), "{got:?}, expected {h:?}");
}

/// A layer that reads backwards alone is one that reads the reversed sequence, reversed.
#[test]
fn a_layer_that_reads_backwards() {
    let (one, other) = (RecurrentConfig { reverse: true, ..RecurrentConfig::new(3, 4) }, RecurrentConfig::new(3, 4));
    let (backward, forward) = (Lstm::new(&init(), one).unwrap(), Lstm::new(&init(), other).unwrap());
    assert!(backward.named_parameters().iter().all(|(n, _)| n.ends_with("_l0_reverse")));
    let x = uniform(&[2, 5, 3], 6);
    let (a, b) = (backward.run(&x, None).unwrap(), forward.run(&x.flip(&[1]).unwrap(), None).unwrap());
    same(&a.output, &b.output.flip(&[1]).unwrap());
    same(&a.state[1], &b.state[1]);
    let both = RecurrentConfig { reverse: true, bidirectional: true, ..RecurrentConfig::new(3, 4) };
    assert!(message(Lstm::new(&init(), both)).contains("`reverse`"));
}

/// The backward direction of a bidirectional layer is the forward direction on the reversed sequence.
#[test]
fn a_bidirectional_layer_reads_both_ways() {
    let config = RecurrentConfig { bidirectional: true, layers: 2, dropout: 0.5, ..RecurrentConfig::new(3, 4) };
    let layer = Gru::new(&init(), config).unwrap();
    let names: Vec<String> = layer.named_parameters().into_iter().map(|(n, _)| n).collect();
    assert_eq!(names.len(), 16);
    assert_eq!(
        names[4..9],
        ["weight_ih_l0_reverse", "weight_hh_l0_reverse", "bias_ih_l0_reverse", "bias_hh_l0_reverse", "weight_ih_l1"]
    );
    layer.eval();
    let x = uniform(&[2, 5, 3], 3);
    let out = layer.run(&x, None).unwrap();
    assert_eq!(out.output.dims(), [2, 5, 8]);
    assert_eq!(out.state[0].dims(), [4, 2, 4]);
    same(&out.output.select(1, 0).unwrap().narrow(1, 4, 4).unwrap(), &out.state[0].select(0, 3).unwrap());

    let one = Gru::new(&init(), RecurrentConfig { bidirectional: true, ..RecurrentConfig::new(3, 4) }).unwrap();
    let forward = Gru::new(&init(), RecurrentConfig::new(3, 4)).unwrap();
    let reversed =
        one.state_dict().unwrap().into_iter().filter_map(|(n, t)| Some((n.strip_suffix("_reverse")?.to_string(), t)));
    forward.load_state_dict(reversed.collect()).unwrap();
    let backward = forward.forward(&x.flip(&[1]).unwrap()).unwrap().flip(&[1]).unwrap();
    same(&one.forward(&x).unwrap().narrow(2, 4, 4).unwrap(), &backward);
}

/// `h' = tanh(W x + b + U h + c)`, one step at a time.
#[test]
fn the_plain_recurrent_layer_by_its_formula() {
    use numcore::ops::MatmulOps;
    let layer = Rnn::new(&init(), RecurrentConfig::new(3, 4)).unwrap();
    let [w, u, b, c]: [V; 4] = layer.parameters().iter().map(Param::var).collect::<Vec<_>>().try_into().unwrap();
    let x = uniform(&[2, 3, 3], 6);
    let mut h = Var::new(Tensor::zeros(&cpu(), [2, 4], DType::F32).unwrap());
    let out = layer.forward(&x).unwrap();
    for t in 0..3 {
        let input = x.select(1, t).unwrap().linear(&w, Some(&b)).unwrap();
        h = input.add(&h.linear(&u, Some(&c)).unwrap()).unwrap().tanh().unwrap();
        same(&out.select(1, t).unwrap(), &h);
    }
}
