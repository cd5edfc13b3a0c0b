//! A decoder of text that attends to another sequence.

use autograd::Var;
use nn::{
    Embedding, Forward, Init, Linear, Module,
    parallel::{CutLayer, Cuts},
};
use numcore::{
    DType, Error, Result, Runtime, Within,
    ops::{Apply, MatmulOps, PointwiseOps, ViewOps},
};

use super::{LayerStack, LayerStackConfig, StackMemory, stack::StackInputs};
use crate::decoder::KvCache;

/// The sizes of a [`TextDecoder`] besides those of its table and its layers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct TextDecoderForm {
    /// The number of learned positions; none if `None`.
    pub positions: Option<usize>,
    /// True if the head is the table of tokens.
    pub tied: bool,
    /// The factor of states before the head.
    pub scale: f64,
}

/// A decoder of text that attends to the states of an encoder.
///
/// Input: tokens `[B, T]` (`i64`). Output: logits of each next token, `[B, T, V]`. There is no dropout: its fields in
/// `config.json` are kept and written back.
#[derive(Debug, Module)]
pub struct TextDecoder<R: Runtime> {
    /// The token embedding, `[V, C]`.
    pub embed_tokens: Embedding<R>,
    /// The position embedding, if positions are learned.
    pub embed_positions: Option<Embedding<R>>,
    /// The layers and the last norm.
    #[module(flatten)]
    pub stack: LayerStack<R>,
    /// The head, if it is not the token embedding.
    pub head: Option<Linear<R>>,
    #[module(skip)]
    form: TextDecoderForm,
}

impl<R: Runtime> TextDecoder<R> {
    /// Creates a decoder with this table of tokens, which other modules may share.
    pub(super) fn new(
        init: &Init<R>,
        embed_tokens: Embedding<R>,
        form: TextDecoderForm,
        layers: LayerStackConfig,
    ) -> Result<Self> {
        let [vocab, width] = [embed_tokens.weight.shape()[0], layers.width];
        let table = |rows| Embedding::new(init, rows, width).map(|table| table.with_cuts(Cuts::None));
        let head = || Linear::new(init, width, vocab).map(Linear::without_bias);
        Ok(TextDecoder {
            embed_tokens,
            embed_positions: form.positions.map(table).transpose()?,
            stack: LayerStack::new(init, layers)?,
            head: (!form.tied).then(head).transpose()?,
            form,
        })
    }

    /// The keys and values of an encoder's `states: [B, S, C]` in each layer. `mask`, `[B, S]`, of `bool` or numbers,
    /// is 0 for padding.
    ///
    /// # Errors
    /// Fails if shapes do not fit.
    #[track_caller]
    pub fn memory(&self, states: &Var<R>, mask: Option<&Var<R>>) -> Result<StackMemory<R>> {
        self.stack.memory(states, mask.map(seen_keys).transpose().at_caller()?).at_caller()
    }

    /// An empty cache of keys and values for up to `capacity` tokens in each of `rows` rows; see [`KvCache::new`].
    pub fn cache(&self, capacity: usize, rows: usize) -> KvCache<R> {
        KvCache::new(self.stack.layers.len(), capacity, vec![0; rows])
    }

    /// Computes logits `[B, T, V]` of tokens `[B, T]` (`i64`), which follow those in `cache`, if there is one.
    ///
    /// # Errors
    /// Fails if shapes do not fit, a learned position is past the last, or the cache is full. Fails too if `memory` is
    /// another decoder's, or `cache` has padding or windows.
    #[track_caller]
    pub fn logits(&self, tokens: &Var<R>, memory: &StackMemory<R>, cache: Option<&mut KvCache<R>>) -> Result<Var<R>> {
        let shape = tokens.spec().shape;
        let &[b, t] = &shape[..] else {
            return Err(Error::shape("decoder", &[shape], "tokens must be [B, T]")).at_caller();
        };
        if b != memory.rows {
            let why = format!("{b} rows of tokens attend to an encoder's {}: give as many", memory.rows);
            return Err(Error::shape("decoder", &[shape], why)).at_caller();
        }
        if !self.stack.remembers(memory) {
            let why = "attends to the keys and values of another decoder: compute them by this model's `encode`, or by \
                       `memory` of this decoder";
            return Err(Error::usage("decoder", why)).at_caller();
        }
        let before = cache.as_ref().map_or(0, |cache| cache.len());
        if let Some(cache) = &cache {
            cache.check(b, t, self.stack.layers.len()).at_caller()?;
            if !cache.is_plain() {
                let why =
                    "a cache with padding or windows is of another kind of decoder: make it by this one's `cache`";
                return Err(Error::usage("decoder", why)).at_caller();
            }
        }
        let mut x = self.embed_tokens.forward(tokens).within("embed_tokens").at_caller()?;
        if let (Some(table), Some(most)) = (&self.embed_positions, self.form.positions) {
            if before + t > most {
                let why = format!("{} positions are more than the context of {most}", before + t);
                return Err(Error::shape("decoder", &[shape], why)).at_caller();
            }
            x = x.add(&table.weight.var().narrow(0, before, t)?)?;
        }
        let inputs = StackInputs { mask: None, memory: Some(memory), cache };
        let states = self.stack.forward_with(&x, inputs).at_caller()?;
        let states = if self.form.scale == 1.0 { states } else { states.mul(self.form.scale)? };
        match &self.head {
            Some(head) => head.forward_onto(&states, None::<&Var<R>>).within("head"),
            None => states.linear(&self.embed_tokens.weight.var(), None).within("head"),
        }
        .at_caller()
    }

    /// The number of learned positions, if positions are learned.
    pub(crate) fn positions(&self) -> Option<usize> {
        self.form.positions
    }
}

/// A mask of keys `[B, S]` as attention takes it, `[B, 1, 1, S]` of `bool`.
pub(super) fn seen_keys<R: Runtime>(mask: &Var<R>) -> Result<Var<R>> {
    let shape = mask.spec().shape;
    let &[b, s] = &shape[..] else {
        return Err(Error::shape("attention", &[shape], "a mask must be [B, S]"));
    };
    if mask.dtype() == DType::Bool { mask.clone() } else { mask.ne(0.0)? }.reshape([b, 1, 1, s])
}
