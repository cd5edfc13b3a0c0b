//! Linear algebra with gradients: solvers, factorizations, determinants and norms of matrices.
//!
//! Solvers and factorizations take a matrix or a batch of them, `[.., M, N]`, in `f32` or `f64`. They compute one after
//! another on the host by [faer](https://docs.rs/faer), in one thread unless a program enables faer's own threads. The
//! CPU's tensors are copied once each way; those of a GPU travel to the host and back. Norms without singular values
//! are computed on the device.
//!
//! Gradients are computed of ops and of these functions, so every function can be differentiated again, where its value
//! is smooth. [`jvp`](autograd::jvp) has no rule for them.
//!
//! ```
//! use autograd::{Var, backward};
//! use linalg::solve;
//! use numcore::{Tensor, ops::ReduceOps};
//! use runtime_cpu::Cpu;
//!
//! let cpu = Cpu::new();
//! let a = Var::leaf("a", Tensor::from_slice(&cpu, [2, 2], &[2.0f64, 1.0, 1.0, 3.0])?)?;
//! let b = Var::new(Tensor::from_slice(&cpu, [2, 1], &[3.0f64, 5.0])?);
//! let x = solve(&a, &b)?;
//! assert!(x.value()?.to_vec::<f64>()?.iter().zip([0.8, 1.4]).all(|(x, y)| (x - y).abs() < 1e-15));
//! assert!(backward(&x.sum_all()?)?.of(&a).is_some());
//! # Ok::<(), numcore::Error>(())
//! ```
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod cholesky;
mod determinant;
mod eigh;
mod host;
mod norm;
mod parts;
mod qr;
mod solve;
mod svd;
mod triangular;

pub use cholesky::cholesky;
pub use determinant::{det, logdet, slogdet};
pub use eigh::{eigh, eigvalsh};
pub use norm::{MatrixNorm, matrix_norm, vector_norm};
pub use qr::qr;
pub use solve::{inverse, solve};
pub use svd::{Svd, svd, svdvals};
pub use triangular::{Triangle, solve_triangular};
