//! Files of a model's folder.

mod gguf;
mod json;
mod mxfp4;
mod pickle;
mod staged;
mod tensors;
mod weights;
mod woven;
mod writer;

pub use json::JsonObject;
pub(crate) use json::is_empty;
use json::save_json;
pub(crate) use weights::Weights;
pub use writer::SaveOptions;
pub(crate) use writer::WeightWriter;
