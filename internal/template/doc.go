// Package template builds and keeps the environments that sandboxes start from:
// the files of a source become one immutable EROFS image, kept with its defaults
// under the hash of both.
//
//	Spec ─▶ Source (package source, debian) ─▶ tree of files (package tree)
//	                                              │
//	Store: name ─▶ digest ─▶ Template ◀─ EROFS image (package image)
//
// # Terms
//
//   - Spec: what a template is made from and what its processes start with.
//   - Source: where the files come from, such as an image in a registry.
//   - Template: one immutable environment in a [Store], named by its [Digest].
//   - Name, tag, [Ref]: a name with a tag refers to one template at a time.
//   - Lease: a holder's claim on a template, which keeps it from being removed.
//   - Grace period: how long a template without a name and a lease is kept.
package template
