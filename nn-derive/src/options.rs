//! Options of `#[module(..)]` on structs and on fields.

use syn::{Attribute, LitStr, Path, Result, Type};

/// The options of a field.
#[derive(Default)]
pub(crate) struct FieldOptions {
    /// The field is not part of the model's state.
    pub skip: bool,
    /// The name of the part; an empty name puts the field's parts among its parent's.
    pub rename: Option<LitStr>,
}

/// The options of a struct.
#[derive(Default)]
pub(crate) struct StructOptions {
    /// The path of the crate `nn`, for crates that have it under another name.
    pub krate: Option<Path>,
    /// The runtime of a model that is written for one alone.
    pub runtime: Option<Type>,
}

/// `#[module(crate = "path")]` and `#[module(runtime = Type)]` on a struct.
pub(crate) fn container(attrs: &[Attribute]) -> Result<StructOptions> {
    let mut options = StructOptions::default();
    for attr in attrs.iter().filter(|a| a.path().is_ident("module")) {
        attr.parse_nested_meta(|meta| {
            if meta.path.is_ident("crate") {
                options.krate = Some(meta.value()?.parse::<LitStr>()?.parse_with(Path::parse_mod_style)?);
            } else if meta.path.is_ident("runtime") && options.runtime.is_none() {
                options.runtime = Some(meta.value()?.parse()?);
            } else {
                return Err(meta.error(
                    "a struct takes `crate = \"path\"` and one `runtime = Type`; `skip`, `rename` and `flatten` belong to fields",
                ));
            }
            Ok(())
        })?;
    }
    Ok(options)
}

/// `#[module(skip)]`, `#[module(rename = "name")]`, `#[module(flatten)]` on a field.
pub(crate) fn field(attrs: &[Attribute]) -> Result<FieldOptions> {
    let mut options = FieldOptions::default();
    for attr in attrs.iter().filter(|a| a.path().is_ident("module")) {
        attr.parse_nested_meta(|meta| {
            if meta.path.is_ident("skip") {
                options.skip = true;
            } else if meta.path.is_ident("flatten") {
                options.rename = Some(LitStr::new("", attr.pound_token.span));
            } else if meta.path.is_ident("rename") {
                options.rename = Some(name(meta.value()?.parse()?)?);
            } else {
                return Err(meta.error("a field takes `skip`, `rename = \"name\"` or `flatten`"));
            }
            Ok(())
        })?;
    }
    Ok(options)
}

/// A dot would make one part look like two in a parameter's name.
fn name(name: LitStr) -> Result<LitStr> {
    if name.value().is_empty() || name.value().contains('.') {
        return Err(syn::Error::new(name.span(), "the name of a part is not empty and has no dot"));
    }
    Ok(name)
}
