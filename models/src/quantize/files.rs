//! Weights in four bits in files, by bitsandbytes' names.

use numcore::{
    DType, Error, Result, Runtime, Shape, Tensor,
    fused::{Linear4bit, NestedScales},
    ops::Apply,
};
use serde_json::{Map, Value, json};

use super::{Weight4bit, torch_name};
use crate::files::{JsonObject, WeightWriter, Weights};

/// The suffix of the tensor with a weight's sizes, as JSON.
const STATE: &str = ".quant_state.bitsandbytes__nf4";
/// The suffixes of the operands of [`Linear4bit`] after the packed elements.
const CODE: &str = ".quant_map";
const SCALES: &str = ".absmax";
const NESTED_SCALES: &str = ".nested_absmax";
const NESTED_CODE: &str = ".nested_quant_map";

/// The fields of the JSON with a weight's sizes.
const STATE_FIELDS: [&str; 7] =
    ["blocksize", "dtype", "nested_blocksize", "nested_dtype", "nested_offset", "quant_type", "shape"];

/// Tells whether a name in files is of a part of a weight in four bits.
pub(crate) fn is_part(name: &str, weights: &Weights) -> bool {
    let parts = [STATE, CODE, SCALES, NESTED_SCALES, NESTED_CODE];
    let whole = parts.iter().find_map(|part| name.strip_suffix(part));
    whole.is_some_and(|whole| weights.has(&format!("{whole}{STATE}")))
}

/// A weight in four bits in a file, of which only the sizes were read.
pub(crate) struct StoredWeight {
    name: String,
    dtype: DType,
    op: Linear4bit,
}

impl StoredWeight {
    /// Finds the weight of this name, if it is stored in four bits.
    ///
    /// # Errors
    /// Fails if the JSON beside the weight is malformed, or has an unknown field or value.
    pub(crate) fn find(weights: &Weights, name: &str) -> Result<Option<Self>> {
        let state = format!("{name}{STATE}");
        if !weights.has(&state) {
            return Ok(None);
        }
        let bytes = weights.bytes(&state)?;
        let fields: Map<String, Value> =
            serde_json::from_slice(&bytes).map_err(|e| Error::format(&*state, format!("it is no JSON object: {e}")))?;
        let fields = JsonObject::of(&*state, fields);
        if let Some(name) = fields.fields().keys().find(|name| !STATE_FIELDS.contains(&name.as_str())) {
            return Err(fields.wrong(name, "is not known here, and may change what is stored"));
        }
        if fields.text("quant_type")? != Some("nf4") {
            return Err(fields.wrong("quant_type", "is not `nf4`: no other code is known"));
        }
        let shape = fields.get("shape").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let size = |at: usize| shape.get(at)?.as_u64().and_then(|n| usize::try_from(n).ok());
        let (Some(outputs), Some(inputs), 2) = (size(0), size(1), shape.len()) else {
            return Err(fields.wrong("shape", "is no pair of sizes"));
        };
        let dtype = match fields.text("dtype")? {
            Some("float32") => DType::F32,
            Some("float16") => DType::F16,
            Some("bfloat16") => DType::BF16,
            other => return Err(fields.wrong("dtype", format_args!("is {other:?}, no floating type of weights"))),
        };
        let block = fields.need("blocksize", fields.count("blocksize")?)?;
        let nested = nested(&fields)?;
        Ok(Some(StoredWeight {
            name: name.into(),
            dtype,
            op: Linear4bit { shape: [outputs, inputs], block, nested, transposed: false },
        }))
    }

    /// The shape of the weight, `[O, I]`.
    pub(crate) fn shape(&self) -> Shape {
        self.op.shape.into()
    }

    /// Reads the weight.
    ///
    /// # Errors
    /// Fails if a part is missing, or its size or type does not fit the other parts.
    pub(crate) fn read<R: Runtime>(&self, rt: &R, weights: &Weights) -> Result<Weight4bit<R>> {
        let part = |suffix: &str| weights.tensor(rt, &format!("{}{suffix}", self.name));
        let mut stored = vec![part("")?, part(CODE)?, part(SCALES)?];
        if self.op.nested.is_some() {
            stored.extend([part(NESTED_SCALES)?, part(NESTED_CODE)?]);
        }
        let specs: Vec<_> = stored.iter().map(Tensor::spec).collect();
        self.op.check(&specs).map_err(|e| Error::state(&*self.name, e.to_string()))?;
        Ok(Weight4bit { op: self.op.clone(), dtype: self.dtype, stored })
    }
}

fn nested(fields: &JsonObject) -> Result<Option<NestedScales>> {
    let Some(block) = fields.count("nested_blocksize")? else { return Ok(None) };
    if !matches!(fields.text("nested_dtype")?, None | Some("float32")) {
        return Err(fields.wrong("nested_dtype", "is not `float32`"));
    }
    let offset = fields.need("nested_offset", fields.number("nested_offset")?)? as f32;
    Ok(Some(NestedScales { block, offset }))
}

impl<R: Runtime> Weight4bit<R> {
    /// The writers of the weight's parts, named `name` with suffixes.
    pub fn writers<'a>(&self, name: &str) -> Vec<WeightWriter<'a, R>> {
        let suffixes = ["", CODE, SCALES, NESTED_SCALES, NESTED_CODE];
        let mut writers: Vec<WeightWriter<'a, R>> = Vec::new();
        for (part, suffix) in self.stored.iter().cloned().zip(suffixes) {
            let (shape, dtype) = (*part.shape(), part.dtype());
            let value = Box::new(move || Ok(part.clone()));
            writers.push(WeightWriter { name: format!("{name}{suffix}"), shape, dtype, value });
        }
        let (text, rt) = (self.state().to_string(), self.stored[0].runtime().clone());
        let shape = Shape::from([text.len()]);
        let value = Box::new(move || Tensor::from_slice(&rt, [text.len()], text.as_bytes()));
        writers.push(WeightWriter { name: format!("{name}{STATE}"), shape, dtype: DType::U8, value });
        writers
    }

    /// The sizes of the weight, as JSON.
    fn state(&self) -> Value {
        let op = &self.op;
        let mut state = json!({
            "quant_type": "nf4", "blocksize": op.block, "dtype": torch_name(self.dtype), "shape": op.shape
        });
        if let (Some(nested), Some(fields)) = (op.nested, state.as_object_mut()) {
            fields.insert("nested_blocksize".into(), nested.block.into());
            fields.insert("nested_dtype".into(), "float32".into());
            fields.insert("nested_offset".into(), f64::from(nested.offset).into());
        }
        state
    }
}

/// The fields of bitsandbytes' configuration: those that are read, those of eight bits, and those that set how
/// bitsandbytes computes products.
const KNOWN: [&str; 13] = [
    "_load_in_4bit",
    "_load_in_8bit",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_quant_type",
    "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_skip_modules",
    "llm_int8_threshold",
    "load_in_4bit",
    "load_in_8bit",
    "quant_method",
];

/// The fields of the configuration of MXFP4.
const KNOWN_OF_MXFP4: [&str; 3] = ["dequantize", "modules_to_not_convert", "quant_method"];

/// A form of quantised weights in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum QuantizedForm {
    /// NF4 of bitsandbytes, in which linear layers are computed.
    Nf4,
    /// MXFP4 of the experts of GPT-OSS, dequantised as they are read.
    Mxfp4,
}

/// The form of quantised weights that a `config.json` describes, if it describes some.
///
/// # Errors
/// Fails if it describes quantised weights of another kind.
pub(crate) fn quantization(fields: &JsonObject) -> Result<Option<QuantizedForm>> {
    let Some(part) = fields.object("quantization_config")? else { return Ok(None) };
    let form = |form, known: &[&str]| {
        let unknown = |name: &&String| part.get(name).is_some() && !known.contains(&name.as_str());
        match part.fields().keys().find(unknown) {
            Some(name) => Err(part.wrong(name, "is not known here, and may change what is stored")),
            None => Ok(Some(form)),
        }
    };
    if part.text("quant_method")? == Some("mxfp4") {
        return form(QuantizedForm::Mxfp4, &KNOWN_OF_MXFP4);
    }
    let is_known = part.flag("load_in_4bit")? == Some(true)
        && part.flag("load_in_8bit")? != Some(true)
        && matches!(part.text("quant_method")?, None | Some("bitsandbytes"))
        && part.text("bnb_4bit_quant_type")? == Some("nf4")
        && matches!(part.text("bnb_4bit_quant_storage")?, None | Some("uint8"));
    if is_known {
        return form(QuantizedForm::Nf4, &KNOWN);
    }
    let why = "is neither MXFP4 nor NF4 of bitsandbytes' with `uint8` storage: other quantised weights are not read; use the unquantised model";
    Err(fields.wrong("quantization_config", why))
}

/// The `quantization_config` of a model with layers like this one. Other fields of the one that was read are kept.
pub(crate) fn quantization_fields<R: Runtime>(before: Option<&Value>, weight: &Weight4bit<R>) -> Value {
    let mut fields = before.and_then(Value::as_object).cloned().unwrap_or_default();
    for (name, value) in [
        ("quant_method", json!("bitsandbytes")),
        ("load_in_4bit", json!(true)),
        ("load_in_8bit", json!(false)),
        ("bnb_4bit_quant_type", json!("nf4")),
        ("bnb_4bit_use_double_quant", json!(weight.op.nested.is_some())),
        ("bnb_4bit_quant_storage", json!("uint8")),
    ] {
        fields.insert(name.into(), value);
    }
    fields.entry("bnb_4bit_compute_dtype").or_insert_with(|| torch_name(weight.dtype).into());
    Value::Object(fields)
}
