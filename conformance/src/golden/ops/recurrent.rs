//! Recurrent layers: the case's parameters, put into a layer under PyTorch's names.

use autograd::Var;
use nn::{GruCell, Init, LstmCell, ModuleEntry, ModuleExt, Recurrent, RecurrentCell, RecurrentConfig, RnnCell, walk};
use numcore::{Error, Result, Runtime, ops::Apply};
use serde_json::Value;

use crate::golden::call::{Call, OpFn};

pub(super) fn find<R: Runtime>(op: &str) -> Option<OpFn<R>> {
    let row: OpFn<R> = match op {
        "lstm" => layer::<R, LstmCell>,
        "gru" => layer::<R, GruCell>,
        "rnn" => layer::<R, RnnCell>,
        _ => return None,
    };
    Some(row)
}

/// The parameter names of inputs 1 and on.
fn names<'a, R: Runtime>(c: &'a Call<'_, R>) -> Result<Vec<&'a str>> {
    let list = c.attrs.raw("params").and_then(Value::as_array).map(|l| l.iter().map(Value::as_str).collect());
    let missing = || Error::format("golden", "attribute `params` must be a list of names");
    list.flatten().ok_or_else(missing)
}

fn layer<R: Runtime, C: RecurrentCell>(c: &Call<'_, R>) -> Result<Vec<Var<R>>> {
    let (x, names) = (c.x(0)?, names(c)?);
    c.attrs.only("batch_first", &true.into())?;
    // Shapes and names of the parameters determine the rest.
    for said in ["hidden", "hidden_size", "input_size", "layers", "num_layers", "bidirectional", "bias"] {
        c.attrs.skip(&[said]);
    }
    let at = |name: &str| names.iter().position(|n| *n == name).map_or(0, |i| i + 1);
    let config = RecurrentConfig {
        inputs: x.dims().last().copied().unwrap_or(0),
        hidden: c.x(at("weight_hh_l0"))?.dims().last().copied().unwrap_or(0),
        layers: names.iter().filter(|n| n.starts_with("weight_ih") && !n.ends_with("reverse")).count(),
        bidirectional: names.iter().any(|n| n.ends_with("reverse")),
        reverse: false,
        dropout: 0.0,
        bias: names.iter().any(|n| n.starts_with("bias")),
    };
    let layer = Recurrent::<R, C>::new(&Init::new(x.runtime(), 0).dtype(x.dtype()), config)?;
    let values = names.iter().enumerate().map(|(i, n)| Ok(((*n).to_string(), c.x(i + 1)?.value()?)));
    layer.load_state_dict(values.collect::<Result<_>>()?)?;
    walk(&layer, |name, entry| {
        if let ModuleEntry::Parameter(p) = entry {
            c.stands_in(at(name), p.var());
        }
    });
    let out = layer.run(x, None)?;
    Ok(std::iter::once(out.output).chain(out.state).collect())
}
