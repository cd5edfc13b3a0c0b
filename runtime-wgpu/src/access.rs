//! Access to elements in words: every buffer is an array of 32-bit words.

use numcore::{Accumulate, DType};

/// The storage of an element, and the type in which a kernel computes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum StorageForm {
    F32,
    I32,
    U32,
    /// A byte, computed as `u32`.
    U8,
    /// A byte of 0 or 1.
    Bool,
    /// Half a word, computed as `f32`.
    F16,
    BF16,
    /// A pair of words, a 64-bit integer.
    I64,
    /// Half a word, moved as bits.
    Bits16,
}

impl StorageForm {
    /// The form for arithmetic. `f64` has the form of two words, which are only moved.
    pub(crate) fn of(dtype: DType) -> StorageForm {
        match dtype {
            // No memory of this device has an 8-bit float, and the printer refuses them in programs.
            DType::F32 | DType::F8E4M3 | DType::F8E5M2 => StorageForm::F32,
            DType::I32 => StorageForm::I32,
            DType::U32 => StorageForm::U32,
            DType::U8 => StorageForm::U8,
            DType::Bool => StorageForm::Bool,
            DType::F16 => StorageForm::F16,
            DType::BF16 => StorageForm::BF16,
            DType::I64 | DType::F64 => StorageForm::I64,
        }
    }

    /// The form that moves elements unchanged: types of one size share kernels, and no bit changes.
    pub(crate) fn bits(dtype: DType) -> StorageForm {
        match dtype.size() {
            1 => StorageForm::U8,
            2 => StorageForm::Bits16,
            4 => StorageForm::U32,
            _ => StorageForm::I64,
        }
    }

    /// The WGSL type in which elements are computed.
    pub(crate) fn ty(self) -> &'static str {
        match self {
            StorageForm::F32 | StorageForm::F16 | StorageForm::BF16 => "f32",
            StorageForm::I32 => "i32",
            StorageForm::U32 | StorageForm::U8 | StorageForm::Bits16 => "u32",
            StorageForm::Bool => "bool",
            StorageForm::I64 => "vec2<u32>",
        }
    }

    /// The number of elements in a word; 1 for 64-bit elements too.
    pub(crate) fn per_word(self) -> u32 {
        match self {
            StorageForm::U8 | StorageForm::Bool => 4,
            StorageForm::F16 | StorageForm::BF16 | StorageForm::Bits16 => 2,
            _ => 1,
        }
    }

    /// The WGSL expression of a value, from an expression of the element's own bits.
    pub(crate) fn decode(self, bits: &str) -> String {
        match self {
            StorageForm::F32 => format!("bitcast<f32>({bits})"),
            StorageForm::I32 => format!("bitcast<i32>({bits})"),
            StorageForm::Bool => format!("({bits} != 0u)"),
            StorageForm::F16 => format!("wg_widen_f16({bits})"),
            StorageForm::BF16 => format!("wg_widen_bf16({bits})"),
            StorageForm::U32 | StorageForm::U8 | StorageForm::Bits16 | StorageForm::I64 => bits.into(),
        }
    }

    /// The WGSL expression of an element's bits, from its value.
    pub(crate) fn encode(self, value: &str) -> String {
        match self {
            StorageForm::F32 | StorageForm::I32 => format!("bitcast<u32>({value})"),
            StorageForm::Bool => format!("select(0u, 1u, {value})"),
            StorageForm::F16 => format!("wg_narrow_f16({value})"),
            StorageForm::BF16 => format!("wg_narrow_bf16({value})"),
            StorageForm::U8 => format!("({value} & 0xffu)"),
            StorageForm::U32 | StorageForm::Bits16 | StorageForm::I64 => value.into(),
        }
    }

    /// The WGSL expression of a sum, with the rules of [`Accumulate::Add`].
    pub(crate) fn add(self, a: &str, b: &str) -> String {
        match self {
            StorageForm::Bool => format!("({a} || {b})"),
            StorageForm::I64 => format!("wg_add_i64({a}, {b})"),
            StorageForm::U8 => format!("(({a} + {b}) & 0xffu)"),
            _ => format!("({a} + {b})"),
        }
    }

    /// The value to store for a result `new` in place of `old`.
    pub(crate) fn accumulate(self, how: Accumulate, old: &str, new: &str) -> String {
        if how == Accumulate::Add { self.add(old, new) } else { new.into() }
    }

    /// The value of a launch parameter that is given as words.
    pub(crate) fn parameter(self, words: &[String]) -> String {
        match (self, words) {
            (StorageForm::I64, [low, high, ..]) => format!("vec2<u32>({low}, {high})"),
            (StorageForm::F16 | StorageForm::BF16, [word, ..]) => StorageForm::F32.decode(word),
            (_, [word, ..]) => self.decode(word),
            _ => String::new(),
        }
    }
}

/// The window and the storage form of an operand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site {
    pub(crate) slot: usize,
    pub(crate) form: StorageForm,
    /// True if several invocations write parts of one word in this window, so that its words are atomics.
    pub(crate) atomic: bool,
}

impl Site {
    fn word(&self, at: &str) -> String {
        let slot = self.slot;
        if self.atomic { format!("atomicLoad(&buf{slot}[{at}])") } else { format!("buf{slot}[{at}]") }
    }

    fn set_word(&self, at: &str, bits: &str) -> String {
        let slot = self.slot;
        if self.atomic {
            format!("atomicStore(&buf{slot}[{at}], {bits});\n")
        } else {
            format!("buf{slot}[{at}] = {bits};\n")
        }
    }

    /// Loads the element at an offset. The offset must be a name or a literal, because it is evaluated more than once.
    pub(crate) fn load(&self, at: &str) -> String {
        let bits = match self.form.per_word() {
            1 if self.form == StorageForm::I64 => {
                format!("vec2<u32>({}, {})", self.word(&format!("2u * {at}")), self.word(&format!("2u * {at} + 1u")))
            }
            1 => self.word(at),
            2 => format!("(({} >> (16u * ({at} & 1u))) & 0xffffu)", self.word(&format!("{at} >> 1u"))),
            _ => format!("(({} >> (8u * ({at} & 3u))) & 0xffu)", self.word(&format!("{at} >> 2u"))),
        };
        self.form.decode(&bits)
    }

    /// Statements that store a value at an offset. Elements smaller than a word are written by atomics, so no other
    /// bits change.
    pub(crate) fn store(&self, at: &str, value: &str) -> String {
        let (slot, bits) = (self.slot, self.form.encode(value));
        let (shift, unit, mask) = match self.form.per_word() {
            1 if self.form == StorageForm::I64 => {
                let low = self.set_word(&format!("2u * {at}"), "pair.x");
                let high = self.set_word(&format!("2u * {at} + 1u"), "pair.y");
                return format!("{{ let pair = {bits};\n{low}{high}}}\n");
            }
            1 => return self.set_word(at, &bits),
            2 => ("1u", "16u * (cell & 1u)", "0xffffu"),
            _ => ("2u", "8u * (cell & 3u)", "0xffu"),
        };
        format!(
            "{{ let cell = {at}; let bits = {bits}; let shift = {unit};\n\
             atomicAnd(&buf{slot}[cell >> {shift}], ~({mask} << shift));\n\
             atomicOr(&buf{slot}[cell >> {shift}], bits << shift); }}\n"
        )
    }
}

/// The declarations at the start of every kernel: its windows and its parameters.
pub(crate) fn header(atomic: &[bool], params: usize) -> String {
    let mut text = String::new();
    for (slot, atomic) in atomic.iter().enumerate() {
        let word = if *atomic { "atomic<u32>" } else { "u32" };
        text += &format!("@group(0) @binding({slot}) var<storage, read_write> buf{slot}: array<{word}>;\n");
    }
    text += &format!("@group(1) @binding(0) var<uniform> P: array<vec4<u32>, {}>;\n", params.div_ceil(4));
    text + "var<private> wg_zero: u32;\n"
}

/// A reader of launch parameters, in the order in which they were written. The first is always 0: see `wg_keep`.
pub(crate) struct Params(usize);

impl Params {
    pub(crate) fn new() -> Self {
        Params(1)
    }

    pub(crate) fn next(&mut self) -> String {
        let i = self.0;
        self.0 += 1;
        format!("P[{}].{}", i / 4, ["x", "y", "z", "w"][i % 4])
    }

    pub(crate) fn many(&mut self, n: usize) -> Vec<String> {
        (0..n).map(|_| self.next()).collect()
    }
}

/// Statements that declare the coordinates `c0 … c{rank−1}` of the position `at`, row-major over `dims`, where `c` is
/// `name`.
pub(crate) fn unravel(name: &str, at: &str, dims: &[String]) -> String {
    match dims.len() {
        0 => String::new(),
        1 => format!("let {name}0 = {at};\n"),
        rank => {
            let mut text = format!("var {name}_left = {at};\n");
            for i in (1..rank).rev() {
                let d = &dims[i];
                text += &format!("let {name}{i} = {name}_left % {d};\n{name}_left = {name}_left / {d};\n");
            }
            text + &format!("let {name}0 = {name}_left;\n")
        }
    }
}

/// The expression `base + c0·s0 + …` of an offset, where `c` is `name` and `s` are the strides.
pub(crate) fn offset(base: &str, name: &str, strides: &[String]) -> String {
    let terms = strides.iter().enumerate().map(|(i, s)| format!(" + {name}{i} * {s}"));
    format!("{base}{}", terms.collect::<String>())
}
