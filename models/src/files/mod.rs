//! Files of a model's folder.

mod json;
mod staged;
mod weights;
mod writer;

pub use json::JsonObject;
use json::save_json;
pub use weights::Weights;
pub use writer::{SaveOptions, WeightWriter};
