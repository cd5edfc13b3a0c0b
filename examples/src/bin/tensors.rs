//! Ten lines of tensors: make some, compute, take a gradient.
#![forbid(unsafe_code)]

use weftgrad::prelude::*;

fn main() -> Result<()> {
    let rt = weftgrad_examples::options::device("Make tensors, compute, take a gradient")?;
    let x = Tensor::arange(&rt, 0.0, 0.5, 6, DType::F32)?.reshape([2, 3])?;
    let w = Tensor::from_slice(&rt, [3, 2], &[1f32, -1.0, 0.5, 2.0, 0.0, 1.0])?;
    println!("x = {x}\n\nx · w = {}\n\nsoftmax = {}\n", x.matmul(&w)?, x.matmul(&w)?.softmax(-1)?);

    let w = Var::leaf("w", w)?;
    let loss = Var::new(x).matmul(&w)?.tanh()?.square()?.mean_all()?;
    let gradients = loss.backward()?;
    println!("loss = {:.6}\n", loss.item()?);
    if let Some(g) = gradients.of(&w) {
        println!("d loss / d w = {g}");
    }
    Ok(())
}
