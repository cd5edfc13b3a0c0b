//! Selection of the fields that hold state, and the code that visits them.

use proc_macro2::TokenStream;
use quote::quote;
use syn::{Error, Fields, GenericArgument, Generics, Ident, LitStr, Member, Path, PathArguments, Result, Type};

use crate::options;

/// Types that hold no state.
const PLAIN: [&str; 17] = [
    "bool", "char", "str", "String", "f32", "f64", "i8", "i16", "i32", "i64", "i128", "isize", "u8", "u16", "u32",
    "u64", "usize",
];

/// Types that hold plain ones.
const WRAPPERS: [&str; 4] = ["Option", "Vec", "Box", "Arc"];

/// The fields of a struct that are visited.
pub(crate) struct Parts(Vec<Part>);

struct Part {
    member: Member,
    name: LitStr,
    ty: Type,
}

impl Parts {
    pub(crate) fn of(fields: &Fields) -> Result<Parts> {
        let mut parts = Vec::new();
        for (member, field) in fields.members().zip(fields) {
            let options = options::field(&field.attrs)?;
            if options.skip || is_plain(&field.ty) {
                continue;
            }
            let name = options.rename.unwrap_or_else(|| name_of(&member));
            parts.push(Part { member, name, ty: field.ty.clone() });
        }
        Ok(Parts(parts))
    }

    /// A struct that names no runtime can only hold state that is independent of runtimes: modes.
    pub(crate) fn require_no_state(&self, ident: &Ident, generics: &Generics) -> Result<()> {
        let with_state = self.0.iter().find(|p| !is_mode(&p.ty)).map(|p| &p.member);
        let Some(member) = with_state else {
            return Ok(());
        };
        let field = match member {
            Member::Named(name) => name.to_string(),
            Member::Unnamed(index) => index.index.to_string(),
        };
        let example = if generics.params.is_empty() { "<R: Runtime>" } else { "<R: Runtime, ..>" };
        let why = format!(
            "`{ident}` has no type parameter bound by `Runtime`, on which its parameters would live; write `struct {ident}{example}`, \
             or #[module(runtime = Cpu)] above a model for one runtime, or mark field `{field}` with #[module(skip)] if it holds none"
        );
        Err(Error::new(ident.span(), why))
    }

    pub(crate) fn visits(&self, nn: &Path, runtime: &Type) -> TokenStream {
        self.0
            .iter()
            .map(|Part { member, name, .. }| quote!(#nn::Module::<#runtime>::visit(&self.#member, #name, visitor);))
            .collect()
    }
}

fn name_of(member: &Member) -> LitStr {
    match member {
        Member::Named(name) => LitStr::new(name.to_string().trim_start_matches("r#"), name.span()),
        Member::Unnamed(index) => LitStr::new(&index.index.to_string(), index.span),
    }
}

fn is_plain(ty: &Type) -> bool {
    match ty {
        Type::Array(a) => is_plain(&a.elem),
        Type::Slice(s) => is_plain(&s.elem),
        Type::Reference(r) => is_plain(&r.elem),
        Type::Paren(p) => is_plain(&p.elem),
        // How a type that a `macro_rules!` was given arrives.
        Type::Group(g) => is_plain(&g.elem),
        Type::Tuple(t) => t.elems.iter().all(is_plain),
        Type::Path(p) => p.path.segments.last().is_some_and(is_plain_segment),
        _ => false,
    }
}

fn is_plain_segment(segment: &syn::PathSegment) -> bool {
    let is = |names: &[&str]| names.iter().any(|n| segment.ident == n);
    match &segment.arguments {
        PathArguments::None => is(&PLAIN),
        PathArguments::AngleBracketed(of) if is(&WRAPPERS) => {
            of.args.iter().all(|a| matches!(a, GenericArgument::Type(t) if is_plain(t)))
        }
        PathArguments::AngleBracketed(_) => segment.ident == "PhantomData",
        PathArguments::Parenthesized(_) => false,
    }
}

fn is_mode(ty: &Type) -> bool {
    match ty {
        Type::Group(g) => is_mode(&g.elem),
        Type::Path(p) => p.path.segments.last().is_some_and(|s| s.ident == "Mode"),
        _ => false,
    }
}
