//! Programs that were printed as Rust and compiled ahead of time: one loop over the operands. The interpreter makes a
//! pass over a block for each step instead, and alternates between computing and waiting for memory.
//!
//! The interpreter remains the definition: compiled programs use its functions and its FMAs, so the bits are equal.
//! `hot.rs` is the list; `cargo xtask hot` writes it. It contains programs that ran at least 1.1 times as fast;
//! programs of one step did not.

use numcore::{
    DType,
    pointwise::{Program, Typed},
};

use super::{
    form::{Form, Output},
    hot,
};
use crate::{Simd, simd::prefetch};

/// Computes `n` elements; slots are a kernel's: elements, inputs, outputs.
///
/// # Safety
/// The slots name `n` elements (of elements: one `f32`) of the body's types, aligned; no other thread writes inputs or
/// accesses outputs meanwhile.
pub(in crate::pointwise) type Body = unsafe fn(simd: Simd, slots: &[*mut u8], n: usize);

/// A program whose operands are stored as one type, or as that type and `f32`.
pub(in crate::pointwise) struct Compiled {
    pub hash: u64,
    /// The index of the output whose old value an input is, for each input.
    pub own: &'static [Option<u16>],
    /// The types of inputs and outputs: `S` is the one type.
    pub inputs: &'static [&'static str],
    pub outputs: &'static [&'static str],
    pub f32: Body,
    /// The body for bf16 operands, which are upcast, computed in `f32`, and rounded once.
    pub bf16: Body,
}

/// Elements that are computed between two prefetches.
const PREFETCHED: usize = 512;
/// The prefetch distance in bytes. The hardware prefetches too late, since a program's many instructions fill the CPU's
/// reorder window. (`gelu` of 16 M elements took 1.4 times as long without.)
const PREFETCH_DISTANCE: usize = 2048;

/// Prefetches elements that will be computed some time after the ones at `at`.
#[inline(always)]
pub(in crate::pointwise) fn prefetch_next<T>(at: *const T) {
    prefetch(at.wrapping_byte_add(PREFETCH_DISTANCE), PREFETCHED);
}

/// The ranges in which `n` elements are computed: blocks if `cut`, otherwise one.
#[inline(always)]
pub(in crate::pointwise) fn steps(n: usize, cut: bool) -> impl Iterator<Item = (usize, usize)> {
    let step = if cut { PREFETCHED } else { n.max(1) };
    (0..n).step_by(step).map(move |at| (at, n.min(at + step)))
}

/// The compiled form of a program whose operands are stored in this form.
pub(in crate::pointwise) fn find(program: &Program, typed: &Typed, form: &Form) -> Option<Body> {
    let compiled = hot::ALL.iter().find(|c| c.hash == program.hash() && *c.own == form.own[..])?;
    let stored = |name: &str, t| if name == "S" { t } else { DType::F32 };
    let mixed = compiled.outputs.iter().any(|name| *name != "S");
    let of = |t: DType| {
        let inputs = form.inputs.iter().zip(compiled.inputs).all(|(i, name)| *i == stored(name, t));
        let outputs =
            form.outputs.iter().zip(compiled.outputs).all(|(o, name)| *o == Output::Overwrite(stored(name, t)));
        // A value of another type would need a cast, which the printed body has only between these two: it upcasts and
        // rounds as operands do.
        let value = |v: &DType| *v == t || *v == DType::Bool || mixed && *v == DType::F32;
        inputs && outputs && typed.dtypes.iter().all(value)
    };
    [(DType::F32, compiled.f32), (DType::BF16, compiled.bf16)].into_iter().find(|(t, _)| of(*t)).map(|(_, body)| body)
}

/// Programs as the generator writes them: a name and its hash, how operands are stored, the slot of each scalar, input
/// and output, the inputs that are old values of outputs, and the printed body.
macro_rules! compiled {
    ($(
        $name:ident $hash:literal own [$($own:expr),*] stored [$($input_type:ident),*] -> [$($output_type:ident),*] {
            numbers $($number:ident $number_at:literal)*;
            reads $($input:ident $input_at:literal $read:ident)*;
            updates $($old:ident $of:ident)*;
            writes $($out:ident $to:ident $out_at:literal $write:ident)*;
        }
        $body:block
    )*) => {
        pub(in crate::pointwise) static ALL: &[$crate::pointwise::compile::compiled::Compiled] = &[
            $($crate::pointwise::compile::compiled::Compiled {
                hash: $hash,
                own: &[$($own),*],
                inputs: &[$(stringify!($input_type)),*],
                outputs: &[$(stringify!($output_type)),*],
                f32: $name::<f32>,
                bf16: $name::<half::bf16>,
            }),*
        ];
        $(
            /// # Safety
            /// [`Body`](super::compiled::Body) states what callers guarantee.
            unsafe fn $name<S: $crate::element::Stored<Lane = f32>>(simd: $crate::Simd, slots: &[*mut u8], n: usize) {
                $crate::simd::multiversion! {
                    fn body<S: ($crate::element::Stored<Lane = f32>)>(
                        n: usize, $($number: f32,)* $($input: &[$read],)* $($to: &mut [$write],)*
                    ) {
                        $(let $input = &$input[..n];)*
                        $(let $to = &mut $to[..n];)*
                        // Optimizers compute too little to be late: prefetching cost them 5 % where all is in cache.
                        const UPDATES: &[&str] = &[$(stringify!($old)),*];
                        for (from, end) in $crate::pointwise::compile::compiled::steps(n, UPDATES.is_empty()) {
                            if UPDATES.is_empty() {
                                $($crate::pointwise::compile::compiled::prefetch_next(&$input[from]);)*
                                $($crate::pointwise::compile::compiled::prefetch_next(&$to[from]);)*
                            }
                            $crate::simd::interleaved! { for i in from..end => {
                                $(let $input = $crate::element::Stored::load($input[i]);)*
                                $(let $old = $crate::element::Stored::load($of[i]);)*
                                $(let $out;)*
                                $body
                                $($to[i] = <$write as $crate::element::Stored>::store($out);)*
                            } }
                        }
                    }
                }
                // SAFETY: the caller guarantees `n` elements in each slot; an input that is an output's old value is
                // read through that output alone.
                unsafe {
                    body::<S>(
                        simd,
                        n,
                        $(*slots[$number_at].cast::<f32>(),)*
                        $(std::slice::from_raw_parts(slots[$input_at].cast::<$read>(), n),)*
                        $(std::slice::from_raw_parts_mut(slots[$out_at].cast::<$write>(), n),)*
                    );
                }
            }
        )*
    };
}
pub(in crate::pointwise) use compiled;

#[cfg(test)]
mod tests {
    use super::*;

    fn find(program: &Program, form: &Form) -> Option<Body> {
        super::find(program, &program.resolve(&form.inputs, &[]).unwrap(), form)
    }

    fn form(own: &[Option<u16>], t: DType, outputs: usize) -> Form {
        let mut form = Form::default();
        own.iter().for_each(|own| form.input(t, *own));
        (0..outputs).for_each(|_| form.output(numcore::Accumulate::Overwrite, t));
        form
    }

    #[test]
    fn what_is_found_is_the_program_over_one_type_with_these_owners() {
        let gelu = Program::new("any name", |[x], []| [x.gelu()]);
        assert!(find(&gelu, &form(&[None], DType::F32, 1)).is_some());
        assert!(find(&gelu, &form(&[Some(0)], DType::F32, 1)).is_none());
        assert!(find(&gelu, &form(&[None], DType::BF16, 1)).is_some());
        assert!(find(&gelu, &form(&[None], DType::F64, 1)).is_none());
        let other = Program::new("gelu", |[x], []| [x.gelu() * 0.5]);
        assert!(find(&other, &form(&[None], DType::F32, 1)).is_none());
    }

    #[test]
    fn no_program_is_listed_twice() {
        for (i, a) in hot::ALL.iter().enumerate() {
            assert!(!hot::ALL[..i].iter().any(|b| (a.hash, a.own) == (b.hash, b.own)));
        }
    }
}
