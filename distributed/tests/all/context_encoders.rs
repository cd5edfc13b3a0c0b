//! Encoders over a context axis, with masks and windows: values and gradients are those of whole sequences.

use nn::{AttentionOptions, MultiHeadAttention};

use crate::prelude::*;

const WIDTH: usize = 8;
const HEADS: usize = 12;
const BATCH: usize = 2;

/// A layer, and the masks that it is given.
#[derive(Clone, Copy, Debug)]
enum Layer {
    Encoder {
        pre_norm: bool,
        masked: bool,
    },
    /// Multi-head attention, whose padding, dense mask, direction and window are set.
    Heads {
        padded: bool,
        added: bool,
        causal: bool,
        window: (Option<usize>, Option<usize>),
        softcap: Option<f64>,
    },
}

/// Gradients, by the name of the parameter.
type Named = Vec<(String, Vec<f64>)>;

#[derive(Module)]
#[module(crate = "::nn")]
struct Cut<R: Runtime> {
    encoder: EncoderBlock<R>,
    heads: MultiHeadAttention<R>,
    context: ContextSlot<R>,
}

impl Cut<Cpu> {
    fn new(rt: &Cpu, pre_norm: bool) -> Result<Self> {
        let init = Init::new(rt, 3).dtype(DType::F64);
        let config = EncoderBlockConfig {
            width: WIDTH * HEADS,
            heads: HEADS,
            hidden: 16,
            activation: Activation::Gelu,
            pre_norm,
            qkv_bias: true,
            eps: 1e-5,
            dropout: 0.25,
        };
        let heads = MultiHeadAttention::new(&init, WIDTH * HEADS, HEADS)?;
        Ok(Cut { encoder: EncoderBlock::new(&init, config)?, heads, context: ContextSlot::cuts() })
    }

    /// The output for this rank's part of `x`, with masks of whole sequences of `tokens` tokens.
    fn output(&self, layer: Layer, x: &Var<Cpu>, tokens: usize) -> Result<Var<Cpu>> {
        let rt = x.runtime();
        let bools = |shape: &[usize]| {
            let numel: usize = shape.iter().product();
            let all: Vec<bool> = (0..numel).map(|i| (i * 7 + i / tokens) % 5 > 1).collect();
            Ok::<_, Error>(Var::new(Tensor::from_slice(rt, numcore::Shape::new(shape)?, &all)?))
        };
        match layer {
            Layer::Encoder { masked, .. } => {
                let mask = masked.then(|| bools(&[BATCH, 1, tokens, tokens])).transpose()?;
                self.encoder.forward_masked(x, mask.as_ref())
            }
            Layer::Heads { padded, added, causal, window, softcap } => {
                let key_padding = padded.then(|| bools(&[BATCH, tokens])).transpose()?;
                let added = added.then(|| Tensor::normal(rt, [HEADS, tokens, tokens], DType::F64, 0.0, 1.0, 8));
                let mask = added.transpose()?.map(Var::new);
                let (mask, key_padding) = (mask.as_ref(), key_padding.as_ref());
                let options = AttentionOptions { mask, key_padding, causal, window, softcap, ..Default::default() };
                self.heads.attend_self(x, options)
            }
        }
    }

    /// This rank's part of the output, and its parameters' gradients of a weighed sum over this rank's part.
    fn values(&self, layer: Layer, rt: &Cpu, tokens: usize) -> Result<(Tensor<Cpu>, Named)> {
        let whole =
            |seed: u64| Tensor::normal(rt, [BATCH, tokens, WIDTH * HEADS], DType::F64, 0.0, 1.0, seed).map(Var::new);
        let part = |x: Var<Cpu>| self.context.take(&x, 1);
        autograd::manual_seed(4);
        let y = self.output(layer, &part(whole(1)?)?, tokens)?;
        let gradients = y.mul(&part(whole(2)?)?)?.sum_all()?.backward()?;
        let mut all = Vec::new();
        for (name, p) in self.named_parameters() {
            let own = gradients.get(&p.leaf()).map(|gradient| gradient.to_vec::<f64>()).transpose()?;
            all.extend(own.map(|own| (name, own)));
        }
        Ok((y.value()?, all))
    }
}

#[test]
fn masks_are_of_whole_sequences() {
    let heads = |padded, added, causal, window, softcap| Layer::Heads { padded, added, causal, window, softcap };
    let layers = [
        Layer::Encoder { pre_norm: true, masked: false },
        Layer::Encoder { pre_norm: false, masked: true },
        heads(false, false, true, (None, None), None),
        heads(true, false, false, (None, None), None),
        heads(true, true, true, (Some(5), None), None),
        heads(false, false, false, (Some(2), Some(3)), Some(4.0)),
        heads(false, true, false, (None, Some(1)), Some(2.0)),
    ];
    for (layer, c) in layers.into_iter().flat_map(|layer| [2, 3, 4].map(|c| (layer, c))) {
        for exchange in [ContextExchange::AllGather, ContextExchange::Ring, ContextExchange::Ulysses] {
            let tokens = 4 * c;
            let pre_norm = matches!(layer, Layer::Encoder { pre_norm: true, .. });
            let outcome = Ranks::new(c).run(cpu, |comm| {
                let (cut, whole) = (Cut::new(comm.runtime(), pre_norm)?, Cut::new(comm.runtime(), pre_norm)?);
                Mesh::new(&comm, ParallelPlan::of([(Axis::Context, c)])?)?.context_parallel(&cut, exchange)?;
                let (y, gradients) = cut.values(layer, comm.runtime(), tokens)?;
                let (all, want) = whole.values(layer, comm.runtime(), tokens)?;
                let part = cut.context.take(&Var::new(all), 1)?.value()?;
                let context = format!("{layer:?} {exchange:?} on {c}");
                close(&y.to_vec::<f64>()?, &part.to_vec::<f64>()?, 1e-12, &context);
                Ok((gradients, want))
            });
            let ranks = outcome.unwrap_or_else(|error| panic!("{layer:?} {exchange:?} on {c}: {error}"));
            for (k, (name, want)) in ranks[0].1.iter().enumerate() {
                let mut sum = vec![0.0; want.len()];
                for (own, _) in &ranks {
                    assert_eq!(own[k].0, *name);
                    sum.iter_mut().zip(&own[k].1).for_each(|(sum, own)| *sum += own);
                }
                close(&sum, want, 1e-11, &format!("{layer:?} {exchange:?} on {c}: {name}"));
            }
        }
    }
}
