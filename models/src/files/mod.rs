//! Files of a model's folder.

mod json;
mod staged;
mod weights;
mod writer;

use json::save_json;
pub use json::{JsonObject, is_empty};
pub use weights::Weights;
pub use writer::{SaveOptions, WeightWriter};
