//! No rank decides by its own part alone.

use comm::Partial;
use numcore::{NullRuntime, Result, Tensor};

fn clip(norm: Partial<Tensor<NullRuntime>>) -> Result<bool> {
    Ok(norm.item()? > 1.0)
}

fn main() {}
