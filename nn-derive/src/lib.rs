//! `#[derive(Module)]`: a model's parameters, buffers and parts, visited by the names of its fields.
//!
//! The crate `nn` re-exports the macro together with the trait, and documents its options.
#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod fields;
mod options;

use proc_macro::TokenStream;
use quote::quote;
use syn::{Data, DeriveInput, Error, Ident, Path, Result, Type, parse_macro_input, parse_quote, spanned::Spanned};

use fields::Parts;

/// Implements `nn::Module` for a struct.
#[proc_macro_derive(Module, attributes(module))]
pub fn module(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(&input, parse_quote!(::nn)).unwrap_or_else(Error::into_compile_error).into()
}

/// Derives `Module` for users of the facade, whose crates do not depend on `nn`: paths begin at `weftgrad::nn`.
#[proc_macro_derive(FacadeModule, attributes(module))]
pub fn facade_module(input: TokenStream) -> TokenStream {
    let input = parse_macro_input!(input as DeriveInput);
    expand(&input, parse_quote!(::weftgrad::nn)).unwrap_or_else(Error::into_compile_error).into()
}

fn expand(input: &DeriveInput, default_crate: Path) -> Result<proc_macro2::TokenStream> {
    let what = match &input.data {
        Data::Struct(data) => data,
        Data::Enum(data) => return Err(unsupported(data.enum_token.span, "an enum")),
        Data::Union(data) => return Err(unsupported(data.union_token.span, "a union")),
    };
    let options = options::container(&input.attrs)?;
    let nn = options.krate.unwrap_or(default_crate);
    let parts = Parts::of(&what.fields)?;
    let mut generics = input.generics.clone();
    let runtime: Type = match (options.runtime, runtime_parameter(&input.generics)) {
        (Some(one), None) => one,
        (None, Some(name)) => parse_quote!(#name),
        (Some(one), Some(_)) => {
            return Err(Error::new(
                one.span(),
                "the struct has a type parameter bound by `Runtime`: remove it, or `runtime = ..`",
            ));
        }
        (None, None) => {
            parts.require_no_state(&input.ident, &input.generics)?;
            generics.params.push(parse_quote!(__R: #nn::Runtime));
            parse_quote!(__R)
        }
    };
    let (implied, _, bounds) = generics.split_for_impl();
    let (_, of, _) = input.generics.split_for_impl();
    let (ident, visits) = (&input.ident, parts.visits(&nn, &runtime));
    Ok(quote! {
        #[automatically_derived]
        impl #implied #nn::Module<#runtime> for #ident #of #bounds {
            fn visit(&self, name: &str, visitor: &mut dyn #nn::Visitor<#runtime>) {
                visitor.enter(name);
                #visits
                visitor.leave();
            }
        }
    })
}

fn unsupported(span: proc_macro2::Span, what: &str) -> Error {
    let why = format!(
        "`Module` cannot be derived for {what}: its parts would depend on its value; implement `visit` by hand"
    );
    Error::new(span, why)
}

/// The type parameter that is bound by `Runtime`, in the list or in the where clause.
fn runtime_parameter(generics: &syn::Generics) -> Option<Ident> {
    let is_runtime = |bound: &syn::TypeParamBound| match bound {
        syn::TypeParamBound::Trait(t) => t.path.segments.last().is_some_and(|s| s.ident == "Runtime"),
        _ => false,
    };
    let in_list = generics.type_params().find(|p| p.bounds.iter().any(is_runtime)).map(|p| p.ident.clone());
    in_list.or_else(|| {
        let clauses = generics.where_clause.iter().flat_map(|w| &w.predicates);
        let types = clauses.filter_map(|p| if let syn::WherePredicate::Type(t) = p { Some(t) } else { None });
        let bound = types.filter(|t| t.bounds.iter().any(is_runtime)).find_map(|t| single_ident(&t.bounded_ty));
        bound.filter(|name| generics.type_params().any(|p| p.ident == *name))
    })
}

fn single_ident(ty: &syn::Type) -> Option<Ident> {
    if let syn::Type::Path(p) = ty { p.path.get_ident().cloned() } else { None }
}
