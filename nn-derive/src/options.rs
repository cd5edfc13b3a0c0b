//! What `#[module(..)]` says on a struct and on its fields.

use syn::{Attribute, LitStr, Path, Result};

/// The options of a field.
#[derive(Default)]
pub struct FieldOptions {
    /// The field is not part of the model's state.
    pub skip: bool,
    /// The name of the part; an empty name puts the field's parts among its parent's.
    pub rename: Option<LitStr>,
}

/// `#[module(crate = "path")]` on a struct.
pub fn container(attrs: &[Attribute]) -> Result<Option<Path>> {
    let mut path = None;
    for attr in attrs.iter().filter(|a| a.path().is_ident("module")) {
        attr.parse_nested_meta(|meta| {
            if !meta.path.is_ident("crate") {
                return Err(meta.error(
                    "a struct takes `crate = \"path\"` alone; `skip`, `rename` and `flatten` belong to fields",
                ));
            }
            path = Some(meta.value()?.parse::<LitStr>()?.parse_with(Path::parse_mod_style)?);
            Ok(())
        })?;
    }
    Ok(path)
}

/// `#[module(skip)]`, `#[module(rename = "name")]`, `#[module(flatten)]` on a field.
pub fn field(attrs: &[Attribute]) -> Result<FieldOptions> {
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
