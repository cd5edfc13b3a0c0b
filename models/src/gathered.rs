//! Whole copies of models that are cut over ranks.

use std::sync::Arc;

use nn::{Init, ModuleExt, parallel::attention_slots};
use numcore::{Error, Result, Runtime, Within, ops::PointwiseOps};

use crate::{
    config::ConfigFields,
    files::JsonObject,
    pretrained::{Pretrained, require_no_adapters},
};

/// Copies a model that is cut over ranks or sharded into a whole one, on every rank. All ranks call this together. The
/// copy generates, evaluates and is saved without exchanges, while the model trains on. Weights in four bits are
/// dequantised. Programs of scores are those of the model.
///
/// # Errors
/// Fails if a value cannot be gathered, the model has adapters, or it is a pipeline stage.
#[track_caller]
pub fn gathered<R: Runtime, M: Pretrained<R>>(model: &M) -> Result<M> {
    require_no_adapters(model).at_caller()?;
    let named = model.named_parameters();
    let Some((_, first)) = named.first().filter(|_| model.is_whole()) else {
        return Err(Error::state("gathered", "is of a stage: save a checkpoint, and load it into a whole model"))
            .at_caller();
    };
    let init = Init::new(first.leaf().runtime(), 0).dtype(first.dtype()).lazily();
    let copy = M::from_fields(&init, &ConfigFields::of(JsonObject::of("the model", model.fields()))).at_caller()?;
    for ((name, from), (_, to)) in attention_slots(model).into_iter().zip(attention_slots(&copy)) {
        let scores = from.scores().map(|scores| scores.gathered()).transpose().within(name).at_caller()?;
        to.set_scores(scores.map(Arc::new));
    }
    for ((name, from), (_, to)) in named.iter().zip(copy.named_parameters()) {
        to.set(from.gathered()?.to_dtype(to.dtype())?).within(name).at_caller()?;
    }
    for ((name, from), (_, to)) in model.named_buffers().iter().zip(copy.named_buffers()) {
        to.set(from.value().to_dtype(to.spec().dtype)?).within(name).at_caller()?;
    }
    Ok(copy)
}
