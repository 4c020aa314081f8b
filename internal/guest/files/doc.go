// Package files is the agent's access to the files of a sandbox: the filesystem
// service of package wire (service.go, watchers.go) and the plain HTTP endpoints
// for contents (content.go, upload.go).
//
// Every path is used with the rights of the user that the request acts as. So
// no check here guards against symbolic links, unusual paths or races: the kernel
// refuses what the user may not do.
//
//	err := u.Do(func() error { // system calls of this function have u's rights
//		f, err = os.Open(path)
//		return err
//	})
package files
