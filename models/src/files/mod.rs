//! Files of a model's folder.

mod json;
mod weights;
mod writer;

pub use json::{JsonObject, save_json};
pub use weights::Weights;
pub use writer::{SaveOptions, WeightWriter};
