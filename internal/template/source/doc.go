// Package source reads the file trees that images are made from: OCI images from
// registries, archives and layouts, tar files and directories.
//
//	Registry, Archive (tarball, layout) ─▶ manifest ─▶ layers ─▶ ┐
//	Tar ─▶ one layer                                             ├─▶ tree.Tree
//	Directory ─▶ files of the host                               ┘
//
// Every input is treated as hostile: it is bounded by tree.Limits, checked against
// its digests where it has them, and merged in memory by name only, so that no
// path of it is ever opened on the host.
//
// # Terms
//
//   - Layer: a tar stream, plain or compressed, that adds files to those before.
//   - Whiteout: an entry of a layer that removes a file of the layers before.
//   - Key: a short text that changes whenever the source's content does; a source
//     without one is read again for each build.
package source
