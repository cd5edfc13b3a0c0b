//! Decoders as stages of pipelines.

use autograd::Var;
use nn::{Embedding, LanguageModel, NextTokenLoss, Stage, parallel::VocabularyLoss};
use numcore::{Error, Result, Runtime, Within};

use super::{Decoder, DecoderInputs, DecoderLayer, DecoderNorm};

type Parts<R> = LanguageModel<R, DecoderLayer<R>, DecoderNorm<R>>;

impl<R: Runtime> Decoder<R> {
    /// Splits this model into pipeline stages; see [`LanguageModel::split`]. A rank reads the stages it keeps, if the
    /// model was built [lazily](nn::Init::lazily). The first stage takes tokens, or tokens with positions and segments,
    /// which stages hand on. Routings of mixtures are not handed on, so stages train without a [balance
    /// loss](Decoder::balance_loss).
    ///
    /// Layers of multi-token prediction belong to the last stage. Its outputs are the logits, then those of each depth
    /// ([`mtp_targets`](super::mtp_targets)). Stages hand on the tokens, and the last has a
    /// [copy](nn::Param::duplicate) of the embedding.
    ///
    /// # Errors
    /// Fails if `stages` is 0.
    #[track_caller]
    pub fn split(self, stages: usize) -> Result<Vec<Self>> {
        Ok(self.split_by(|parts| Ok((parts.split(stages)?, ()))).at_caller()?.0)
    }

    /// Splits this model into [stages](Decoder::split), and returns with them the loss of the last stage's logits; see
    /// [`LanguageModel::split_with_loss`].
    ///
    /// # Errors
    /// Fails if `stages` is 0.
    #[track_caller]
    pub fn split_with_loss(self, stages: usize, loss: VocabularyLoss) -> Result<(Vec<Self>, NextTokenLoss<R>)> {
        self.split_by(|parts| parts.split_with_loss(stages, loss)).at_caller()
    }

    /// Splits the parts. The last stage gets the layers of multi-token prediction, and a copy of the embedding unless
    /// its head is one.
    fn split_by<T>(self, split: impl FnOnce(Parts<R>) -> Result<(Vec<Parts<R>>, T)>) -> Result<(Vec<Self>, T)> {
        let Decoder { parts, mtp, mtp_tokens, config, .. } = self;
        let table = parts.embedding.as_ref().map(|embedding| embedding.tokens.weight.clone());
        let (parts, more) = split(parts)?;
        let mut stages: Vec<_> = parts.into_iter().map(|parts| Decoder::of(parts, &config)).collect();
        if let Some(last) = stages.last_mut().filter(|_| !mtp.is_empty()) {
            let needs_copy = last.parts.embedding.is_none() && !config.tied;
            let copy = table.filter(|_| needs_copy).map(|table| table.duplicate().map(Embedding::of));
            (last.mtp, last.mtp_tokens) = (mtp, copy.transpose()?.or(mtp_tokens));
        }
        Ok((stages, more))
    }
}

impl<R: Runtime> Stage<R> for Decoder<R> {
    fn forward_values(&self, inputs: &[Var<R>]) -> Result<Vec<Var<R>>> {
        let predicts = self.config.options.mtp_layers > 0;
        // Later stages of a model with multi-token prediction are given the tokens too, at the end.
        let (tokens, inputs) = match inputs.split_last() {
            Some((tokens, inputs)) if predicts && self.parts.embedding.is_none() => (Some(tokens), inputs),
            _ => (inputs.first().filter(|_| predicts), inputs),
        };
        let (x, given) = match inputs {
            [x] => (x, DecoderInputs::default()),
            [x, positions, segments] => {
                (x, DecoderInputs { positions: Some(positions), segments: Some(segments), cache: None })
            }
            _ => {
                let allowed = "1, or 3 with positions and segments";
                return Err(Error::range("decoder stage", "number of values", inputs.len(), allowed));
            }
        };
        let placement = self.placement(x, &given)?;
        let x = if self.parts.embedding.is_some() { self.embed_here(x, &placement)? } else { x.clone() };
        let (x, _) = self.through_layers(x, &placement, None)?;
        if self.parts.head.is_none() {
            return Ok(std::iter::once(&x).chain(&inputs[1..]).chain(tokens).cloned().collect());
        }
        let states = self.parts.normalized(&x)?;
        let depths = tokens.map(|tokens| self.depths(&states, tokens, &placement)).transpose()?;
        let depths = depths.iter().flatten().map(|depth| &depth.states);
        std::iter::once(&states).chain(depths).map(|states| self.parts.stage_logits(states)).collect()
    }
}
